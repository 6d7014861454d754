// The built-in kinds of update rules (Parameter Hub §3.2.2), each in a file of its own. They are pure functions, like
// those of kernel.h.
//
// SGD, Adam and AdamW compute the bits of PyTorch's torch.optim on CPU tensors with its default settings (foreach and
// fused unset, amsgrad off). They do the same operations in the same order. They fuse multiply-adds where PyTorch's
// AVX2 and AVX-512 kernels fuse them. They compute scalars in double and round them to the parameters' type. They use
// the square root of square_root.h. An element's result depends on its own values alone. It does not depend on the
// element's place, on how a tensor is cut into slices, or on the vector width. Values that nobody sets are the defaults
// of torch.optim; LAMB, which torch.optim lacks, has those of Adam with the eps of its usual implementations.
#pragma once

#include <span>

#include "kernel/dispatch.h"
#include "poseidon/update.h"

namespace poseidon::kernel {

/// A kind without its two functions, and these functions for a given instruction set, which this CPU must have. From
/// them the registry makes the kind for the best instruction set.
struct BuiltInRule {
  UpdateKind kind;
  void (*update_float32)(Isa isa, const UpdateCall<float>& call) = nullptr;
  void (*update_float64)(Isa isa, const UpdateCall<double>& call) = nullptr;
};

/// Returns all built-in kinds, in the order of their registration.
std::span<const BuiltInRule> built_in_rules();

/// The sums of squares over a layer, in double.
struct LambNorms {
  double parameter_squares = 0;
  double direction_squares = 0;
};

/// The first half of LAMB (You et al. 2020, Algorithm 2). It updates exp_avg and exp_avg_sq with the gradient as Adam
/// does. It sets scratch[i] = m̂ / (√v̂ + eps) + weight_decay · parameter, which is the direction. It sums the norms in
/// an order that depends on the number of elements alone.
template <typename T>
LambNorms lamb_direction(Isa isa, const UpdateCall<T>& call);

/// The second half of LAMB: parameters -= lr · ratio · scratch. The ratio is ‖parameters‖ / ‖direction‖ of the whole
/// layer, or 1 if one of the norms is zero.
template <typename T>
void lamb_apply(Isa isa, const LambNorms& norms, const UpdateCall<T>& call);

inline UpdateValue flag(const char* name) { return {.name = name, .least = 0, .most = 1, .is_flag = true}; }
inline UpdateValue number(const char* name, double initial) { return {.name = name, .initial = initial}; }

POSEIDON_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
POSEIDON_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

}  // namespace poseidon::kernel
