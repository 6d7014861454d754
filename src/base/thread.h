// Threads, and what they wait for. In a simulated world (world.h) they are simulated ones, and waiting takes virtual
// time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/world.h"

namespace poseidon {

/// The number of the calling thread. The kernel does not give it away again soon, unlike a pthread_t.
ThreadNumber this_thread_number();
/// It expires when the calling thread ends.
std::weak_ptr<const void> life_of_this_thread();
/// Such as "thread 4711 (psd-client)".
std::string name_of_thread(ThreadNumber thread);
bool has_ended(ThreadNumber thread);

/// Does nothing for this time.
void pause_for(std::chrono::nanoseconds time);

/// A thread, which has to be joined or left alone before this is destroyed.
class Thread {
 public:
  Thread() = default;
  /// Starts it. `name` shows in `top -H` and debuggers (15 characters count); empty: the name of the thread that starts
  /// it.
  Thread(std::string name, std::function<void()> body);
  Thread(Thread&& other) noexcept { *this = std::move(other); }
  Thread& operator=(Thread&& other) noexcept;
  ~Thread() = default;

  bool joinable() const { return thread_.joinable() || simulated_ != 0; }
  /// Waits until it has ended.
  void join();
  /// Leaves it alone.
  void detach();

 private:
  std::thread thread_;
  ThreadNumber simulated_ = 0;  // 0: there is none
};

/// A condition variable, whose deadlines are those of Clock. Thread-safe.
class Condition {
 public:
  void notify_all() {
    if (World* const world = World::current()) [[unlikely]]
      return world->wake(this);
    changed_.notify_all();
  }

  template <typename Holds>
  void wait(std::unique_lock<std::mutex>& lock, Holds holds) {
    while (!holds()) wait(lock);
  }
  /// Waits for a notification until then. It may also return without a reason.
  void wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point latest) {
    if (World* const world = World::current()) [[unlikely]]
      return wait_in(*world, lock, latest.time_since_epoch().count());
    changed_.wait_until(lock, latest);
  }
  /// Returns whether it holds.
  template <typename Holds>
  bool wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point latest, Holds holds) {
    while (!holds()) {
      if (Clock::now() >= latest) return false;
      wait_until(lock, latest);
    }
    return true;
  }
  template <typename Holds>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds longest, Holds holds) {
    return wait_until(lock, Clock::now() + longest, std::move(holds));
  }

 private:
  void wait(std::unique_lock<std::mutex>& lock) {
    if (World* const world = World::current()) [[unlikely]]
      return wait_in(*world, lock, World::kForEver);
    changed_.wait(lock);
  }
  void wait_in(World& world, std::unique_lock<std::mutex>& lock, std::int64_t until_ns);

  std::condition_variable changed_;
};

/// Something that happens once and that others wait for. Copies are about the same thing. Thread-safe.
class Completion {
 public:
  /// Of nothing.
  Completion() = default;
  static Completion make();

  bool valid() const { return shared_ != nullptr; }
  void complete() const;
  void wait() const;
  /// Returns whether it has happened.
  bool wait_for(std::chrono::nanoseconds longest) const;

 private:
  struct Shared {
    std::mutex mutex;
    Condition changed;
    bool happened = false;  // guarded by mutex
  };
  std::shared_ptr<Shared> shared_;
};

}  // namespace poseidon
