// Aggregators: how a server makes one array of what all ranks have contributed to a chunk (Parameter Hub §3.2.2).
//
// An aggregator is known by its name. `sum` is the sum of the contributions, divided by the push's divisor: servers
// make it while the contributions arrive, so it has no function here. `median` is built in. register_aggregator adds
// further ones to this process. UpdateRule::aggregator names the one that a layer uses.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "poseidon/status.h"

namespace poseidon {

/// The longest name of an aggregator.
inline constexpr std::size_t kMaxAggregatorNameBytes = 24;
/// The name of the aggregator that layers use if their rule names no other.
inline constexpr std::string_view kSumAggregator = "sum";

/// What an aggregator's function gets: a piece of a chunk. All spans have the same number of elements, and the result
/// overlaps no contribution.
template <typename T>
struct AggregateCall {
  /// In rank order; at least one. A rank that had no gradient counts as zeros. Ranks without which a step has ended,
  /// and ranks that only catch up, are left out (stragglers=drop).
  std::span<const std::span<const T>> contributions;
  std::span<T> result;  // what takes the place of the contributions' mean; to be written, with any content before
};

/// An aggregator that collects the contributions of all ranks.
///
/// The two functions do the same for the two types. Layers of float16 and bfloat16 use the function for float32, and
/// the result is rounded once. The functions have to be deterministic: the result depends on the call alone. They may
/// run on several threads at once and must not throw. Layers are cut anywhere, so an element of the result may depend
/// only on this element of the contributions.
struct Aggregator {
  std::string name;
  std::function<void(const AggregateCall<float>&)> aggregate_float32;
  std::function<void(const AggregateCall<double>&)> aggregate_float64;
};

/// Makes an aggregator known to this process, for good. Do so before the first step, in every process that hosts a
/// server; workers need only the name. Servers refuse an aggregator that they do not know.
/// ErrorCode::invalid_argument names what is wrong: a name that is taken or not allowed, or a function that is missing.
/// Any thread.
Status register_aggregator(Aggregator aggregator);

/// The aggregator with this name. Null for the sum, and where this process knows none. Any thread. It stays where it
/// is.
const Aggregator* find_aggregator(std::string_view name);

/// The names of the aggregators that this process knows: the sum, and then the others in the order of registration. Any
/// thread.
std::vector<std::string> aggregator_names();

/// ErrorCode::invalid_argument for what cannot be an aggregator's name. Names have 1 to kMaxAggregatorNameBytes
/// lower-case letters, digits and underscores.
Status check_aggregator_name(std::string_view name);

}  // namespace poseidon
