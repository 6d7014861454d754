// RateLimit: limits how many bytes one owner moves in a second on all its loops together, such as a job on a server.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace poseidon {

/// Thread-safe.
class RateLimit {
 public:
  /// What an owner that has paused may move at once: as much as in this time.
  static constexpr std::chrono::milliseconds kBurst{20};

  /// 0: no limit.
  explicit RateLimit(std::uint64_t bytes_per_second)
      : ns_per_byte_(bytes_per_second == 0 ? 0 : 1e9 / static_cast<double>(bytes_per_second)) {}

  /// Counts bytes. Returns the moment from which they may move, on the clock of `time_ns`; at once if it has passed.
  /// Whoever comes first gets the earlier moment.
  std::int64_t take(std::size_t size_bytes, std::int64_t time_ns) {
    if (ns_per_byte_ == 0) return time_ns;
    const auto taken_ns = static_cast<std::int64_t>(static_cast<double>(size_bytes) * ns_per_byte_);
    const std::int64_t earliest_ns = time_ns - std::chrono::nanoseconds(kBurst).count();
    std::int64_t free_ns = free_ns_.load(std::memory_order_relaxed);
    std::int64_t begin_ns = 0;
    do {
      begin_ns = std::max(free_ns, earliest_ns);
    } while (!free_ns_.compare_exchange_weak(free_ns, begin_ns + taken_ns, std::memory_order_relaxed));
    return begin_ns;
  }

 private:
  const double ns_per_byte_;
  std::atomic<std::int64_t> free_ns_{0};  // when what has been counted will have moved
};

}  // namespace poseidon
