// The two halves of lamb, for their tests.
#pragma once

#include "kernel/update_rules/built_in.h"

namespace poseidon::kernel {

/// Sums of squares over a layer, in double.
struct LambNorms {
  double parameter_squares = 0;
  double direction_squares = 0;
};

/// LAMB's first half (You et al. 2020, Algorithm 2): exp_avg and exp_avg_sq take in the gradient as in Adam,
/// scratch[i] = m̂ / (√v̂ + eps) + weight_decay · parameter is the direction.
/// The norms are summed in an order that depends on the number of elements alone.
template <typename T>
LambNorms lamb_direction(Isa isa, const UpdateCall<T>& call);

/// LAMB's second half: parameters -= lr · ratio · scratch, where ratio = ‖parameters‖ / ‖direction‖ of the whole layer,
/// 1 where one of them is zero.
template <typename T>
void lamb_apply(Isa isa, const LambNorms& norms, const UpdateCall<T>& call);

}  // namespace poseidon::kernel
