// ConnectAttempts: the order and the times of the tries of one connect().
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>

#include "base/clock.h"

namespace poseidon {

/// Every candidate address gets its turn, again and again until the deadline. Between rounds there is a pause, because
/// the other side may not be up yet: 50 ms, doubling up to 500 ms. One thread.
class ConnectAttempts {
 public:
  /// `candidate_count` is above 0.
  ConnectAttempts(std::size_t candidate_count, Clock::time_point deadline)
      : candidate_count_(candidate_count), deadline_(deadline) {}

  /// The index of the candidate whose turn it is.
  std::size_t candidate() const { return candidate_; }

  /// When to give up what begins now and may take `longest`.
  Clock::time_point limit(Clock::duration longest) const { return std::min(deadline_, Clock::now() + longest); }

  /// The candidate has failed, and the next one's turn comes. Returns when to try it; nullopt after the deadline.
  std::optional<Clock::time_point> next() {
    candidate_ = (candidate_ + 1) % candidate_count_;
    const auto now = Clock::now();
    if (now >= deadline_) return std::nullopt;
    if (candidate_ != 0) return now;
    const auto pause = pause_;
    pause_ = std::min(pause_ * 2, kLongestPause);
    return std::min(deadline_, now + pause);
  }

 private:
  static constexpr std::chrono::milliseconds kLongestPause{500};

  const std::size_t candidate_count_;
  const Clock::time_point deadline_;
  std::size_t candidate_ = 0;
  std::chrono::milliseconds pause_{50};
};

}  // namespace poseidon
