// The library's clocks. Traces of all threads and of Python use now_ns(). Deadlines use Clock. In a simulated world
// (world.h) all of them show its time, and it is never stopped.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/pinned.h"
#include "base/world.h"

namespace poseidon {

/// The monotonic clock, less the time in which this process did not run because it was stopped or frozen (SIGSTOP, a
/// paused container, a suspended job). Every deadline uses it, so a job that was suspended goes on. A pause is noticed
/// while a KeepsTime exists, if it is longer than a second. Any thread may read the clock.
struct Clock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now() noexcept;
};

/// Whoever has deadlines keeps one of these. The first one in a process starts a thread that ticks, and the last one
/// ends it.
class KeepsTime : private Pinned {
 public:
  KeepsTime();
  ~KeepsTime();

 private:
  const bool real_;
};

/// CLOCK_MONOTONIC in nanoseconds: what Python's time.monotonic_ns() returns. It is for measuring and for records. What
/// has lasted too long is told by ran_since_ns().
inline std::int64_t now_ns() {
  if (const World* const world = World::current()) [[unlikely]]
    return world->now_ns();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Since when, by now_ns(), this process has run for this long. What began earlier has lasted longer.
std::int64_t ran_since_ns(std::chrono::nanoseconds time);

/// When now_ns() will have this value, if the process is not stopped before.
inline Clock::time_point time_of(std::int64_t time_ns) {
  return Clock::now() + std::chrono::nanoseconds(time_ns - now_ns());
}

/// The time of day in nanoseconds since 1970. It is for people to read, never for waiting.
inline std::int64_t wall_ns() {
  if (const World* const world = World::current()) [[unlikely]]
    return world->wall_ns();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace poseidon
