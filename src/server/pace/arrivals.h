// When the contributions of a step arrive, and when one counts as late (stragglers=drop).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/one_thread.h"

namespace poseidon {

/// The times at which the ranks' contributions to the open step of one chunk were complete. Only the loop thread of its
/// shard uses it.
class Arrivals {
 public:
  explicit Arrivals(std::uint32_t worker_count) : times_ns_(worker_count, kNotYet) {}

  /// Adds an arrival. Returns true if it is the one with which more than half of the ranks have arrived.
  bool add(std::uint32_t rank, std::int64_t time_ns);
  /// Removes a rank's arrival, because its sender has left.
  void remove(std::uint32_t rank);
  bool more_than_half() const { return one_thread_.checked(count_) > times_ns_.size() / 2; }
  /// The median absolute deviation of the arrivals, in ns. Ranks that have not arrived count as the farthest. Only with
  /// more_than_half().
  std::int64_t deviation_ns() const;
  void reset();

 private:
  static constexpr std::int64_t kNotYet = INT64_MAX;

  std::vector<std::int64_t> times_ns_;  // by rank
  std::size_t count_ = 0;
  [[no_unique_address]] OneThread one_thread_{"Arrivals"};
};

/// How long after the median rank the others of a job usually arrive, on one server core. Only the loop thread uses it.
class ArrivalSpread {
 public:
  /// Adds the deviation of a step that has ended.
  void add(std::int64_t deviation_ns);
  /// How long after the median arrival a step waits: `factor` deviations, but no less than kLeastWaitNs.
  std::int64_t wait_ns(double factor) const;
  /// Until when a step waits for late ranks whose median rank came at `median_ns`. Nothing: the step, counted from 1,
  /// is one of the first, which wait for all.
  std::optional<std::int64_t> deadline_ns(std::uint64_t step, std::int64_t median_ns, double factor) const;

  /// How many steps of a chunk wait for every rank, while the chunk learns how far apart the ranks usually are.
  static constexpr std::uint64_t kLearningSteps = 10;
  /// The shortest wait. Smaller differences are noise.
  static constexpr std::int64_t kLeastWaitNs = 5'000'000;

 private:
  static constexpr std::size_t kWindow = 64;  // the number of last steps of chunks that count

  std::array<std::int64_t, kWindow> deviations_ns_{};
  std::size_t added_count_ = 0;
  std::int64_t usual_ns_ = 0;  // the median of those in the window
  [[no_unique_address]] OneThread one_thread_{"ArrivalSpread"};
};

}  // namespace poseidon
