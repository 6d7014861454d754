#include "client/right_of_way.h"

#include <algorithm>

namespace poseidon {

namespace {

// What is worth a message: it takes this long at the rate at which bytes come.
constexpr double kLeastSeconds = 0.01;
// Holding is judged after this time. Queues in the network have run empty by then.
constexpr std::int64_t kProofNs = 150'000'000;
// As much as before has to come in, or the port idles while others wait.
constexpr double kEnough = 0.93;
constexpr std::int64_t kLeastPauseNs = 1'000'000'000;
constexpr std::int64_t kMostPauseNs = 60'000'000'000;

}  // namespace

RightOfWay::Change RightOfWay::look(std::int64_t time_ns) {
  one_thread_.check();
  const std::uint64_t total = rate_.total();
  if (holds()) {
    held_ns_ += time_ns - since_ns_;
    held_bytes_ += static_cast<double>(total - total_);
    since_ns_ = time_ns;
    total_ = total;
    if (held_ns_ > kProofNs) {
      const bool pays = held_bytes_ * 1e9 > kEnough * before_ * static_cast<double>(held_ns_);
      held_ns_ = 0;
      held_bytes_ = 0;
      pause_ns_ = pays ? 0 : std::clamp(2 * pause_ns_, kLeastPauseNs, kMostPauseNs);
      if (!pays) {
        not_before_ns_ = time_ns + pause_ns_;
        return release();
      }
    }
    return urgent_bytes_ > 0 ? Change::none : release();
  }
  if (urgent_bytes_ == 0 || other_bytes_ == 0 || time_ns < not_before_ns_) return Change::none;
  const double rate = rate_.at(time_ns);
  if (rate <= 0 || static_cast<double>(urgent_bytes_) < kLeastSeconds * rate) return Change::none;
  before_ = held_ns_ == 0 ? rate : std::max(before_, rate);
  since_ns_ = time_ns;
  total_ = total;
  return Change::hold;
}

RightOfWay::Change RightOfWay::release() {
  since_ns_ = 0;
  return Change::release;
}

}  // namespace poseidon
