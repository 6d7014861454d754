// Lateness: how often this rank was late, as the answers to its pushes say (stragglers=drop).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "poseidon/client.h"
#include "wire/pace.h"

namespace poseidon {

/// There is one for the units that were added together, because the units of one model go through the same steps.
class Lateness {
 public:
  /// Notes that a unit's exchange has completed, and that `late_chunks` of its chunks were late. `behind_before` and
  /// `behind_now` say how many steps the unit was and is behind, at most wire::kMostStragglerSteps.
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

  /// How many steps the unit that is furthest behind is behind.
  std::uint32_t behind() const { return behind_; }
  /// Adds these counts to `all`.
  void add_to(LateRank& all) const {
    all.late_steps += own_.late_steps;
    all.late_chunks += own_.late_chunks;
    all.last_step = std::max(all.last_step, own_.last_step);
  }

 private:
  LateRank own_;
  std::array<std::uint32_t, wire::kMostStragglerSteps + 1>
      units_behind_{};  // the number of units by how far they are behind
  std::uint32_t behind_ = 0;
};

}  // namespace poseidon
