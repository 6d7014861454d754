// Pace: whom the steps of a job wait for. The job's choice, which its workers tell every server in their hello.
#pragma once

#include <cstdint>
#include <optional>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "wire/header.h"

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

/// ErrorCode::invalid_argument, naming the option, where the numbers are out of range or the two choices exclude each
/// other.
Result<Pace> pace_of(const Options& options);

/// Whether the options choose a baseline of aggregation, which cannot leave stragglers out.
bool has_baselines(const Options& options);

/// To and from the fields of a hello's header that have no other meaning there. Empty for what no `pace_of` gives.
void write_pace(const Pace& pace, Header& header);
std::optional<Pace> read_pace(const Header& header);

}  // namespace poseidon::wire
