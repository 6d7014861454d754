// Pace: whom the steps of a job wait for. The job chooses it, and its workers tell every server in their hello.
#pragma once

#include <cstdint>
#include <optional>

#include "poseidon/features.h"
#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon::wire {

using poseidon::kMostStaleness;
using poseidon::kMostStragglerSteps;

struct Pace {
  Stragglers stragglers = Stragglers::wait;
  Consistency consistency = Consistency::bsp;
  std::uint32_t bound = 0;  // drop: Options::straggler_steps; ssp: Options::staleness; else 0
  float factor = 0;         // drop: Options::straggler_factor; else 0

  bool operator==(const Pace&) const = default;
};

/// ErrorCode::invalid_argument: the numbers are out of range. The text names the option. Whether the two choices go
/// together says `FeatureSet` (poseidon/features.h).
Result<Pace> pace_of(const Options& options);
/// The features of the options that give this pace.
FeatureSet features_of(const Pace& pace);

/// A pace as a hello gives it. It has no `Pace` if no options give these numbers.
struct PaceNumbers {
  std::uint8_t choice = 0;  // 0 wait, 1 drop, 2 ssp, 3 async
  std::uint32_t bound = 0;
  float factor = 0;
};
PaceNumbers numbers_of(const Pace& pace);
std::optional<Pace> pace_of(const PaceNumbers& numbers);

}  // namespace poseidon::wire
