// FairShare: jobs that share a server core take turns by the time that each has taken, however many connections it has
// and however small its messages are.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace poseidon {

/// One job's account of a core's time, in rounds of its loop. Loop thread only.
///
/// Every job may take kSlice in a round. A turn, once begun, is not cut short: what it takes too much is a debt that
/// the next rounds pay off. Where no other job has anything to do, rounds follow each other at once and nothing is
/// lost.
class FairShare {
 public:
  // Beside a flood of tiny messages a job with large ones gets 0.80 of what it gets beside an equal; with 200 µs it is
  // 0.60 (bench/neighbours.py).
  static constexpr std::chrono::microseconds kSlice{50};

  /// Whether the job may have a turn in this round. Then `end` follows.
  bool begin(std::uint64_t round, std::int64_t time_ns) {
    const std::uint64_t passed = round - round_;
    round_ = round;
    const std::int64_t slice_ns = std::chrono::nanoseconds(kSlice).count();
    const auto paid_rounds = static_cast<std::uint64_t>(taken_ns_ / slice_ns);
    taken_ns_ = passed > paid_rounds ? 0 : taken_ns_ - static_cast<std::int64_t>(passed) * slice_ns;
    if (taken_ns_ >= slice_ns) return false;
    began_ns_ = time_ns;
    return true;
  }
  void end(std::int64_t time_ns) { taken_ns_ += time_ns - began_ns_; }

 private:
  std::uint64_t round_ = 0;
  std::int64_t taken_ns_ = 0;  // in this round, with the debt of earlier ones
  std::int64_t began_ns_ = 0;
};

}  // namespace poseidon
