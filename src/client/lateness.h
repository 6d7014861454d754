// Lateness: what the answers to a rank's pushes say of its being late (stragglers=drop).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "poseidon/client.h"
#include "wire/pace.h"

namespace poseidon {

/// Under its client's mutex, but for behind().
class Lateness {
 public:
  /// A unit's exchange has completed, `late_chunks` of it too late. The unit was so many steps behind before, and is
  /// now; neither is more than wire::kMostStragglerSteps.
  void note(std::uint64_t step, std::size_t late_chunks, std::uint32_t behind_before, std::uint32_t behind_now) {
    own_.late_chunks += late_chunks;
    if (late_chunks > 0 && step > own_.last_step) {
      own_.last_step = step;
      ++own_.late_steps;
    }
    if (behind_before > 0) --units_behind_[behind_before];
    if (behind_now > 0) ++units_behind_[behind_now];
    std::uint32_t most = wire::kMostStragglerSteps;
    while (most > 0 && units_behind_[most] == 0) --most;
    behind_.store(most, std::memory_order_relaxed);
  }

  /// Of the unit that is furthest behind. Any thread.
  std::uint32_t behind() const { return behind_.load(std::memory_order_relaxed); }
  /// This rank, if it has ever been late.
  std::vector<LateRank> report(std::uint32_t rank) const {
    if (own_.late_chunks == 0) return {};
    LateRank own = own_;
    own.rank = rank;
    return {own};
  }

 private:
  LateRank own_;
  std::array<std::uint32_t, wire::kMostStragglerSteps + 1> units_behind_{};  // how many, by steps
  std::atomic<std::uint32_t> behind_{0};
};

}  // namespace poseidon
