// ArrivalRate: how fast bytes have come in of late.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/one_thread.h"

namespace poseidon {

/// Counts in two spans of time: the current one and the one before. Times are those of now_ns(). Not thread-safe.
class ArrivalRate {
 public:
  static constexpr std::int64_t kSpanNs = 20'000'000;

  void add(std::size_t size_bytes, std::int64_t time_ns) {
    one_thread_.check();
    turn(time_ns);
    current_ += size_bytes;
    total_ += size_bytes;
  }
  /// Bytes a second in the last 20 to 40 ms.
  double at(std::int64_t time_ns) {
    one_thread_.check();
    turn(time_ns);
    return static_cast<double>(before_ + current_) * 1e9 / static_cast<double>(kSpanNs + time_ns - begun_ns_);
  }
  /// All bytes so far.
  std::uint64_t total() const { return one_thread_.checked(total_); }

 private:
  void turn(std::int64_t time_ns) {
    const std::int64_t passed = time_ns - begun_ns_;
    if (passed < kSpanNs) return;
    before_ = passed < 2 * kSpanNs ? current_ : 0;
    current_ = 0;
    begun_ns_ = passed < 2 * kSpanNs ? begun_ns_ + kSpanNs : time_ns;
  }

  std::uint64_t total_ = 0;
  std::uint64_t before_ = 0;
  std::uint64_t current_ = 0;
  std::int64_t begun_ns_ = 0;  // of the current span
  [[no_unique_address]] OneThread one_thread_{"ArrivalRate"};
};

}  // namespace poseidon
