// Lateness: what the answers to a rank's pushes say of its being late (stragglers=drop).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "poseidon/client.h"
#include "wire/pace.h"

namespace poseidon {

/// Of the units that were added together: those of one model go through the same steps, others count theirs apart.
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
    behind_ = wire::kMostStragglerSteps;
    while (behind_ > 0 && units_behind_[behind_] == 0) --behind_;
  }

  /// Of the unit that is furthest behind.
  std::uint32_t behind() const { return behind_; }
  /// Counts these steps into `all`.
  void add_to(LateRank& all) const {
    all.late_steps += own_.late_steps;
    all.late_chunks += own_.late_chunks;
    all.last_step = std::max(all.last_step, own_.last_step);
  }

 private:
  LateRank own_;
  std::array<std::uint32_t, wire::kMostStragglerSteps + 1> units_behind_{};  // how many, by steps
  std::uint32_t behind_ = 0;
};

}  // namespace poseidon
