// SimulatedWorld: virtual time, and threads that take turns in one thread. The same seed gives the same run.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/world.h"
#include "simulation/fiber.h"

namespace poseidon::testing {

/// Everything that has happened, in order: a digest, and the text if it is kept.
class Trace {
 public:
  /// Keeps the text from here on.
  void keep() { kept_ = true; }
  void note(std::int64_t time_ns, std::string_view who, std::string_view what);

  std::uint64_t digest() const { return digest_; }
  std::uint64_t line_count() const { return line_count_; }
  const std::string& text() const { return text_; }

 private:
  void add(std::string_view part);

  std::uint64_t digest_ = 0xcbf29ce484222325u;  // FNV-1a of the lines
  std::uint64_t line_count_ = 0;
  bool kept_ = false;
  std::string text_;
};

/// A thread runs until it waits. Then the one runs whose turn is next: by time, and at the same time by a number that
/// follows from the seed. Whoever is woken runs some microseconds later, as many as follow from the seed. So the order
/// differs from seed to seed, and time goes on whatever the threads do. Computing takes no time.
///
/// If nobody can go on, or `longest` has passed, the process ends with a report that says who waits for what.
class SimulatedWorld final : public World {
 public:
  explicit SimulatedWorld(std::uint64_t seed, std::chrono::nanoseconds longest = std::chrono::hours(24));
  ~SimulatedWorld() override;

  /// Runs `body` as a thread of this world, and all threads that it starts. They have to end before it does.
  void run(std::function<void()> body);

  Trace& trace() { return trace_; }
  /// Adds a line to the trace, with the time and the calling thread.
  void note(std::string_view what);
  /// A number that looks random and follows from the seed and the order of the calls.
  std::uint64_t random();
  /// Of this world, since it began.
  std::chrono::nanoseconds elapsed() const { return std::chrono::nanoseconds(now_ns_ - kBegin); }
  std::uint64_t turn_count() const { return turn_count_; }

  std::int64_t now_ns() const override { return now_ns_; }
  std::int64_t wall_ns() const override;
  void fill_with_random_bytes(std::span<std::byte> out) override;
  ThreadNumber start_thread(std::string name, std::function<void()> body) override;
  ThreadNumber this_thread() const override;
  std::weak_ptr<const void> life_of_this_thread() const override;
  bool has_ended(ThreadNumber thread) const override { return !threads_.contains(thread); }
  std::string name_of(ThreadNumber thread) const override;
  void join(ThreadNumber thread) override;
  bool wait(const void* what, std::int64_t until_ns, const char* kind) override;
  void wake(const void* what) override;

 private:
  static constexpr std::int64_t kBegin = 1'000'000'000'000;

  /// When a thread has its next turn.
  struct Turn {
    std::int64_t time_ns = 0;
    std::uint64_t tie = 0;
    ThreadNumber thread = 0;
    auto operator<=>(const Turn&) const = default;
  };
  struct Simulated {
    Simulated(Stacks& stacks, std::string its_name, std::function<void()> body)
        : name(std::move(its_name)), fiber(stacks, std::move(body)) {}
    const std::string name;
    Fiber fiber;
    std::shared_ptr<const int> life = std::make_shared<const int>(0);
    Turn turn;
    const void* what = nullptr;  // null: it does not wait, or has been woken
    const char* kind = "its first turn";
    bool woken = false;
  };

  Simulated& running() const;
  std::int64_t soon();
  void plan(ThreadNumber number, Simulated& thread, std::int64_t time_ns);
  void take_turn();
  void forget_wait(Simulated& thread);
  [[noreturn]] void stand_still(const char* why) const;

  const std::uint64_t seed_;
  const std::int64_t end_ns_;
  std::uint64_t drawn_count_ = 0;
  std::int64_t now_ns_ = kBegin;
  std::uint64_t turn_count_ = 0;
  Trace trace_;
  Stacks stacks_;
  std::map<ThreadNumber, std::unique_ptr<Simulated>> threads_;  // that have not ended
  std::map<Turn, Simulated*> turns_;
  std::unordered_map<const void*, std::vector<Simulated*>> waiting_;
  Simulated* running_ = nullptr;  // null: nobody
};

/// Adds a line to the trace of the simulated world in which the caller is, if it is in one.
void note_in_trace(std::string_view what);

/// Runs a test in virtual time.
inline void in_virtual_time(std::function<void()> body) { SimulatedWorld(1).run(std::move(body)); }

}  // namespace poseidon::testing
