// When the contributions of a step come, and from when on one counts as late (stragglers=drop).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

/// When the ranks' contributions to the open step of one chunk were complete. Loop thread of its shard only.
class Arrivals {
 public:
  explicit Arrivals(std::uint32_t worker_count) : times_ns_(worker_count, kNotYet) {}

  /// True for the one that makes more than half of the ranks.
  bool add(std::uint32_t rank, std::int64_t time_ns);
  /// The contribution has gone with its sender.
  void remove(std::uint32_t rank);
  bool more_than_half() const { return count_ > times_ns_.size() / 2; }
  /// How far from the median rank's arrival half of the ranks are at least, in ns: the median absolute deviation.
  /// Ranks that have not come count as the farthest. Only with more_than_half().
  std::int64_t deviation_ns() const;
  void reset();

 private:
  static constexpr std::int64_t kNotYet = INT64_MAX;

  std::vector<std::int64_t> times_ns_;  // by rank
  std::size_t count_ = 0;
};

/// How long after the median rank the others of a job usually come, on one server core. Loop thread only.
class ArrivalSpread {
 public:
  /// A step of a chunk has ended.
  void add(std::int64_t deviation_ns);
  /// How long after the median arrival a step waits: `factor` deviations, but no less than kLeastWaitNs.
  std::int64_t wait_ns(double factor) const;

  /// Differences that small are nobody's fault.
  static constexpr std::int64_t kLeastWaitNs = 5'000'000;

 private:
  static constexpr std::size_t kWindow = 64;  // steps of chunks that count

  std::array<std::int64_t, kWindow> deviations_ns_{};
  std::size_t added_count_ = 0;
  std::int64_t usual_ns_ = 0;  // the median of those in the window
};

}  // namespace poseidon
