// What a layer may do: the one place that decides it. poseidon/layer.h has what others ask for.
#pragma once

#include "poseidon/layer.h"
#include "poseidon/plan.h"

namespace poseidon {

/// Why a layer cannot be in a plan, if it cannot.
Status check_layer(const Layer& layer, const Cluster& cluster, const Options& options);

/// Makes a checked layer what it is in a plan, and returns its terms.
LayerTerms settle(Layer& layer, const Cluster& cluster, const Options& options);

/// The schemes among which the cheapest is taken for an exchange, if `factor_count` is the mean number of factors, or
/// of rows, of the workers. An unknown one is 0.
SchemeSet schemes_at(const Layer& layer, double factor_count, const Cluster& cluster);

}  // namespace poseidon
