// ConnectAttempts: the order and the times of the tries of one connect().
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>

#include "base/clock.h"
#include "base/invariant.h"
#include "base/one_thread.h"

namespace poseidon {

/// Tries every candidate address in turn, again and again until the deadline. Between rounds there is a pause, because
/// the other side may not be up yet. The pause is 50 ms and doubles up to 500 ms. Only one thread uses it.
class ConnectAttempts {
 public:
  /// `candidate_count` must be above 0.
  ConnectAttempts(std::size_t candidate_count, Clock::time_point deadline)
      : candidate_count_(candidate_count), deadline_(deadline) {
    invariant(candidate_count > 0, "there is an address to connect to");
  }

  /// The index of the candidate whose turn it is.
  std::size_t candidate() const { return one_thread_.checked(candidate_); }

  /// Returns when to give up a try that begins now and may take `longest`.
  Clock::time_point limit(Clock::duration longest) const {
    return std::min(one_thread_.checked(deadline_), Clock::now() + longest);
  }

  /// The candidate has failed, and the next one's turn comes. Returns when to try it; nullopt after the deadline.
  std::optional<Clock::time_point> next() {
    one_thread_.check();
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
  [[no_unique_address]] OneThread one_thread_{"ConnectAttempts"};
};

}  // namespace poseidon
