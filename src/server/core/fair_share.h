// FairShare: jobs that share a server core take turns. A job's turn depends on the time that the job has taken. It does
// not depend on how many connections the job has, nor on how small its messages are.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "base/one_thread.h"

namespace poseidon {

/// One job's account of a core's time, counted in rounds of the core's loop. Only the loop thread uses it.
///
/// Every job may take kSlice in a round. A turn that has begun is not cut short. The time that a job takes beyond its
/// slice is subtracted from its next rounds. When no other job has work, rounds follow each other at once, so no time
/// is lost.
class FairShare {
 public:
  // A job with large messages was measured beside a flood of tiny messages. It got 0.80 of what it gets beside an equal
  // job. With a slice of 200 µs it got 0.60 (bench/neighbours.py).
  static constexpr std::chrono::microseconds kSlice{50};

  /// Whether the job may have a turn in this round. If so, the caller must call `end` after the turn.
  bool begin(std::uint64_t round, std::int64_t time_ns) {
    one_thread_.check();
    const std::uint64_t passed = round - round_;
    round_ = round;
    const std::int64_t slice_ns = std::chrono::nanoseconds(kSlice).count();
    const auto paid_rounds = static_cast<std::uint64_t>(taken_ns_ / slice_ns);
    taken_ns_ = passed > paid_rounds ? 0 : taken_ns_ - static_cast<std::int64_t>(passed) * slice_ns;
    if (taken_ns_ >= slice_ns) return false;
    began_ns_ = time_ns;
    return true;
  }
  void end(std::int64_t time_ns) { one_thread_.checked(taken_ns_) += time_ns - began_ns_; }

 private:
  std::uint64_t round_ = 0;
  std::int64_t taken_ns_ = 0;  // the time taken in this round, with what earlier rounds took too much
  std::int64_t began_ns_ = 0;
  [[no_unique_address]] OneThread one_thread_{"FairShare"};
};

}  // namespace poseidon
