// The square root that PyTorch computes on this CPU.
//
// PyTorch's x86 builds take Tensor.sqrt from the vector library of MKL, which is not correctly rounded
// everywhere. Its float32 result is on CPUs of AMD a refinement of the RSQRTPS estimate without fused
// multiply-adds, up to 0.75 units in the last place off, and on Intel's with AVX-512 one of the VRSQRT14PS
// estimate with them, 0.7 % of its results not the nearest. Adam has its bits only with the same steps.
// Everywhere else, and for float64, this is the IEEE square root.
#pragma once

#include <cstddef>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

POSEIDON_INLINE float ieee_root(float value) { return __builtin_sqrtf(value); }
POSEIDON_INLINE double ieee_root(double value) { return __builtin_sqrt(value); }

/// values[i] = √values[i]. An element's result depends on its value alone.
void square_root(Isa isa, float* values, std::size_t element_count);
void square_root(Isa isa, double* values, std::size_t element_count);

}  // namespace poseidon::kernel
