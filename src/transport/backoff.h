// Backoff: how long connecting waits between tries while the other side is not up yet.
#pragma once

#include <algorithm>
#include <chrono>

namespace poseidon {

/// The waits begin with 50 ms and double up to 500 ms: quick if the peer is just starting, cheap if it is late.
class Backoff {
 public:
  std::chrono::milliseconds next() {
    const auto now = delay_;
    delay_ = std::min(delay_ * 2, kLongest);
    return now;
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{500};
  std::chrono::milliseconds delay_{50};
};

}  // namespace poseidon
