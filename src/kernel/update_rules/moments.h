// What Adam, AdamW and LAMB share: running averages of the gradient (exp_avg) and of its square (exp_avg_sq).
#pragma once

#include <cmath>
#include <vector>

#include "kernel/update_rules/built_in.h"

namespace poseidon::kernel {

/// The rules' values, in this order.
enum MomentsValue : std::size_t { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize };
inline std::vector<UpdateValue> moments_values(double eps, double weight_decay) {
  return {number("lr", 1e-3),
          number("beta1", 0.9),
          number("beta2", 0.999),
          number("eps", eps),
          number("weight_decay", weight_decay),
          flag("maximize")};
}

/// The scalars of one step.
template <typename T>
struct Moments {
  explicit Moments(const UpdateCall<T>& call)
      : sign(call.values[kMaximize] != 0 ? T{-1} : T{1}),
        first_share(static_cast<T>(1 - call.values[kBeta1])),
        // Tensor.lerp starts from the end that is nearer.
        from_first(std::abs(first_share) < T{0.5}),
        first_factor(from_first ? first_share : first_share - T{1}),
        beta2(static_cast<T>(call.values[kBeta2])),
        second_share(static_cast<T>(1 - call.values[kBeta2])),
        first_correction(1 - std::pow(call.values[kBeta1], static_cast<double>(call.update_count))),
        // PyTorch computes the root as a power.
        second_correction_root(
            std::pow(1 - std::pow(call.values[kBeta2], static_cast<double>(call.update_count)), 0.5)) {}

  T sign;
  T first_share;
  bool from_first;
  T first_factor;
  T beta2, second_share;
  double first_correction, second_correction_root;
};

template <typename T>
POSEIDON_INLINE void update_moments(const Moments<T>& moments, T g, T& first, T& second) {
  first = fused(moments.first_factor, g - first, moments.from_first ? first : g);
  second = fused(moments.second_share * g, g, second * moments.beta2);
}

}  // namespace poseidon::kernel
