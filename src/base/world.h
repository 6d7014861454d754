// World: where time, randomness and threads come from (docs/decisions/0065-time.md).
//
// The real world is the operating system's, and has no object. A simulated one has virtual time and runs all its
// threads in one, so that a test is repeatable from its seed. Code in src/ asks clock.h, thread.h and random_bytes.h,
// which ask the world of the calling thread. tools/check_structure.py refuses everything that goes past them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "base/pinned.h"

namespace poseidon {

/// Threads of a simulated world have numbers from here on. The kernel's numbers are smaller.
using ThreadNumber = std::int64_t;
inline constexpr ThreadNumber kFirstSimulatedThread = ThreadNumber{1} << 32;

/// A simulated world. Only its own threads may use it, of which one runs at a time.
class World : private Pinned {
 public:
  virtual ~World() = default;

  /// The world of the calling thread, or null in the real one. Where no world is simulated it costs a load.
  static World* current() noexcept {
    if (simulated_count_.load(std::memory_order_relaxed) == 0) [[likely]]
      return nullptr;
    return of_this_thread();
  }

  virtual std::int64_t now_ns() const = 0;   // of the monotonic clock
  virtual std::int64_t wall_ns() const = 0;  // since 1970
  virtual void fill_with_random_bytes(std::span<std::byte> out) = 0;

  /// Starts a thread that runs `body`. It does not run before the caller waits for something.
  virtual ThreadNumber start_thread(std::string name, std::function<void()> body) = 0;
  virtual ThreadNumber this_thread() const = 0;
  /// It expires when the calling thread ends.
  virtual std::weak_ptr<const void> life_of_this_thread() const = 0;
  virtual bool has_ended(ThreadNumber thread) const = 0;
  virtual std::string name_of(ThreadNumber thread) const = 0;
  /// Waits until the thread has ended.
  virtual void join(ThreadNumber thread) = 0;

  static constexpr std::int64_t kForEver = std::numeric_limits<std::int64_t>::max();
  /// Lets the other threads run until one of them wakes those that wait on `what`, or until now_ns() has this value.
  /// Returns false if it was the time. `kind` says in reports of a standstill what it waits for; static storage.
  virtual bool wait(const void* what, std::int64_t until_ns, const char* kind) = 0;
  /// They run later, when the caller waits.
  virtual void wake(const void* what) = 0;

  /// The world of the calling thread as long as this lives.
  class Entered : private Pinned {
   public:
    explicit Entered(World& world);
    ~Entered();

   private:
    World* const outer_;
  };

 private:
  static World* of_this_thread() noexcept;

  static inline std::atomic<int> simulated_count_{0};  // threads that are in a simulated world
};

}  // namespace poseidon
