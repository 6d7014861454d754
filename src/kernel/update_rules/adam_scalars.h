// What one step of Adam or AdamW works on. The two differ in where weight decay is applied.
#pragma once

#include "kernel/update_rules/moments.h"

namespace poseidon::kernel {

enum class Decay { none, of_gradient, of_parameters };

template <typename T>
struct AdamScalars {
  AdamScalars(const UpdateCall<T>& call, Decay decays)
      : moments(call),
        decay(static_cast<T>(decays == Decay::of_parameters ? 1 - call.values[kLr] * call.values[kWeightDecay]
                                                            : call.values[kWeightDecay])),
        root_divisor(static_cast<T>(moments.second_correction_root)),
        eps(static_cast<T>(call.values[kEps])),
        negative_step(static_cast<T>(-(call.values[kLr] / moments.first_correction))) {}

  Moments<T> moments;
  T decay, root_divisor, eps, negative_step;
};

template <typename T>
struct AdamArrays {
  T* parameters;
  const T* gradient;
  T* first;
  T* second;
};

}  // namespace poseidon::kernel
