#include "transport/coding_choice.h"

#include "base/invariant.h"

namespace poseidon {

namespace {
// What is known of the coder's rate follows the last so many bytes.
constexpr double kRememberedBytes = 64e6;
}  // namespace

void CodingChoice::on_wait(std::int64_t time_ns) {
  one_thread_.check();
  began_to_wait_ns_ = time_ns;
  if (flow_count_ > 0 && woken_ns_ != 0) busy_ns_ += time_ns - woken_ns_;
}

void CodingChoice::on_wake(std::int64_t time_ns) {
  one_thread_.check();
  woken_ns_ = time_ns;
  if (flow_count_ > 0 && began_to_wait_ns_ != 0) waited_ns_ += time_ns - began_to_wait_ns_;
  if (busy_ns_ + waited_ns_ >= kWindowNs) decide();
}

void CodingChoice::end_message() {
  one_thread_.check();
  invariant(flow_count_ > 0, "a message that ends has begun");
  --flow_count_;
}

void CodingChoice::on_coded(std::size_t plain_bytes, std::int64_t time_ns) {
  one_thread_.check();
  coded_bytes_ += static_cast<double>(plain_bytes);
  coding_ns_ += static_cast<double>(time_ns);
  if (coded_bytes_ < kRememberedBytes) return;
  coded_bytes_ /= 2;
  coding_ns_ /= 2;
}

void CodingChoice::decide() {
  const auto window_ns = static_cast<double>(busy_ns_ + waited_ns_);
  double busy_ns = static_cast<double>(busy_ns_);
  if (!pays_ && coded_bytes_ > 0) busy_ns += static_cast<double>(plain_bytes_) * coding_ns_ / coded_bytes_;
  pays_ = busy_ns <= (pays_ ? kMostBusy : kBusyToBegin) * window_ns;
  busy_ns_ = waited_ns_ = 0;
  plain_bytes_ = 0;
}

}  // namespace poseidon
