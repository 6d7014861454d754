// RateLimit: how fast one job may receive and send on a server (Options::rate_limit).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace poseidon {

/// An account of what a job has moved in either direction, on all cores of a server together. The server charges what
/// has come and what it sends, and reads nothing more from a job that is ahead of its rate. So nothing that has been
/// received waits, and the job's workers are slowed down by TCP itself. It is the generic cell rate algorithm: one
/// number a direction, the time at which all that was charged would have passed at the rate. Thread-safe.
class RateLimit {
 public:
  /// How far a job may be ahead: it makes up for that after the timer of its next turn comes late.
  static constexpr std::chrono::milliseconds kAhead{10};

  /// `bytes_per_second` must not be 0.
  explicit RateLimit(std::uint64_t bytes_per_second) : ns_per_byte_(1e9 / static_cast<double>(bytes_per_second)) {}

  void charge_received(std::size_t bytes, std::int64_t time_ns) { charge(received_until_ns_, bytes, time_ns); }
  void charge_sent(std::size_t bytes, std::int64_t time_ns) { charge(sent_until_ns_, bytes, time_ns); }

  /// For what was charged and did not travel; negative if more has travelled.
  void give_back_sent(std::int64_t bytes) { sent_until_ns_.fetch_sub(cost_ns(bytes), std::memory_order_relaxed); }

  /// When the job may receive again. It may now if that has passed.
  std::int64_t free_at_ns() const {
    return std::max(received_until_ns_.load(std::memory_order_relaxed),
                    sent_until_ns_.load(std::memory_order_relaxed)) -
           std::chrono::nanoseconds(kAhead).count();
  }

 private:
  void charge(std::atomic<std::int64_t>& until_ns, std::size_t bytes, std::int64_t time_ns) const {
    std::int64_t before_ns = until_ns.load(std::memory_order_relaxed);
    while (!until_ns.compare_exchange_weak(before_ns,
                                           std::max(before_ns, time_ns) + cost_ns(static_cast<std::int64_t>(bytes)),
                                           std::memory_order_relaxed)) {
    }
  }
  std::int64_t cost_ns(std::int64_t bytes) const {
    return static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_);
  }

  const double ns_per_byte_;
  std::atomic<std::int64_t> received_until_ns_{0};
  std::atomic<std::int64_t> sent_until_ns_{0};
};

}  // namespace poseidon
