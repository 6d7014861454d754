// The built-in aggregators (Parameter Hub §3.2.2), each in a file of its own. They are pure functions, like those of
// kernel.h.
#pragma once

#include <string>

#include "kernel/dispatch.h"
#include "poseidon/aggregate.h"

namespace poseidon::kernel {

/// A name and the two functions for a given instruction set, which this CPU must have. From them the registry makes the
/// aggregator for the best instruction set. The result does not depend on the instruction set.
struct BuiltInAggregator {
  std::string name;
  void (*aggregate_float32)(Isa isa, const AggregateCall<float>& call) = nullptr;
  void (*aggregate_float64)(Isa isa, const AggregateCall<double>& call) = nullptr;
};

/// The middle one of the contributions, element by element; of an even number of them the mean of the two in the
/// middle, (a + b) / 2. NaNs count as larger than all numbers, so that a minority of ranks cannot make the result
/// useless.
BuiltInAggregator median();

}  // namespace poseidon::kernel
