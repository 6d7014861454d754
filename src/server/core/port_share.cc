#include "server/core/port_share.h"

namespace poseidon {

namespace {

// 16 workers and 8 servers on ports of 156.25 Mb/s with queues of 64 KB, 64 tensors of 256 KiB: with these numbers
// 0.88 of a plain copy and 6 to 13 timeouts, without a limit 0.54 and 2,200 timeouts.
constexpr double kLoss = 0.005;  // in one window: the rate is above the port's
constexpr double kLess = 0.98;   // of the rate, after such a window
// How much the rate grows after kFullWindows without loss. The first estimate is often a half too low, because the port
// idled, so the steps are large at first. A loss makes them small, and each one without loss makes the next larger.
constexpr double kSmallestStep = 0.005;
constexpr double kLargestStep = 0.05;
constexpr double kStepGrowth = 1.15;
constexpr int kFullWindows = 2;
constexpr double kFull = 0.9;           // of the rate: the workers use what they may
constexpr double kForgotten = 1.0 / 8;  // of what was counted, a window
// Of the most that ever came in. Loss that stays then has another cause, such as a network that changes the order.
constexpr double kLeast = 0.8;

double share_of(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::uint64_t PortShare::update(const Window& window) {
  one_thread_.check();
  const double rate = static_cast<double>(window.received_bytes) / std::chrono::duration<double>(window.length).count();
  const double loss = share_of(window.lost_packets, window.packets);
  recent_senders_[next_] = window.sender_count;
  next_ = (next_ + 1) % recent_senders_.size();
  most_received_ = std::max(most_received_, rate);
  packets_ += static_cast<double>(window.packets) - packets_ * kForgotten;
  lost_packets_ += static_cast<double>(window.lost_packets) - lost_packets_ * kForgotten;
  if (port_rate_ > 0) {
    follow(rate, loss);
  } else if (lost_packets_ > std::max(kMostLoss * packets_, kFewestLost) && senders() >= kFewestSenders) {
    port_rate_ = most_received_;
    step_ = kLargestStep;
  }
  return senders() < kFewestSenders ? 0 : static_cast<std::uint64_t>(port_rate_ / static_cast<double>(senders()));
}

void PortShare::follow(double rate, double loss) {
  if (loss > kLoss) {
    port_rate_ = std::max(port_rate_ * kLess, most_received_ * kLeast);
    step_ = kSmallestStep;
    full_windows_ = 0;
  } else if (rate > kFull * port_rate_ && ++full_windows_ >= kFullWindows) {
    port_rate_ *= 1 + step_;
    step_ = std::min(step_ * kStepGrowth, kLargestStep);
    full_windows_ = 0;
  }
}

}  // namespace poseidon
