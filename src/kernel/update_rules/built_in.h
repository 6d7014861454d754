// The built-in kinds of update rules (Parameter Hub §3.2.2), each in a file of its own. Pure, like kernel.h.
//
// SGD, Adam and AdamW have the bits of PyTorch's torch.optim on CPU tensors with its default settings (foreach and
// fused unset, amsgrad off): the same operations in the same order, multiply-adds fused where PyTorch's AVX2 and
// AVX-512 kernels fuse them, scalars computed in double and rounded to the parameters' type, the square root of
// square_root.h. An element's result depends on its own values alone: neither on its place, nor on how a tensor is cut
// into slices, nor on the vector width.
#pragma once

#include <span>
#include <type_traits>

#include "kernel/dispatch.h"
#include "poseidon/update.h"

namespace poseidon::kernel {

/// A kind without its two functions, and what they do for a given instruction set, which this CPU must have. The
/// registry makes them of these for the best one.
struct BuiltInRule {
  UpdateKind kind;
  void (*update_float32)(Isa isa, const UpdateCall<float>& call);
  void (*update_float64)(Isa isa, const UpdateCall<double>& call);
};

/// All of them, in the order of their registration.
std::span<const BuiltInRule> built_in_rules();

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

inline UpdateValue flag(const char* name) { return {.name = name, .least = 0, .most = 1, .is_flag = true}; }
inline UpdateValue number(const char* name) { return {.name = name}; }

POSEIDON_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
POSEIDON_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

}  // namespace poseidon::kernel
