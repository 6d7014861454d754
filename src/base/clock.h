// The library's clocks. All threads use one monotonic clock, so that their traces can be compared.
#pragma once

#include <chrono>
#include <cstdint>

namespace poseidon {

using Clock = std::chrono::steady_clock;

/// CLOCK_MONOTONIC in nanoseconds: what Python's time.monotonic_ns() returns.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

/// The time of day in nanoseconds since 1970. It is for people to read, never for waiting.
inline std::int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace poseidon
