// The square root that PyTorch computes on this CPU.
//
// PyTorch's x86 builds take Tensor.sqrt from the vector library of MKL, which does not round correctly everywhere. On
// AMD CPUs its float32 result is a refinement of the RSQRTPS estimate without fused multiply-adds, up to 0.75 units in
// the last place off. On Intel CPUs with AVX-512 it is a refinement of the VRSQRT14PS estimate with fused
// multiply-adds, and 0.7 % of the results are not the nearest. Adam has PyTorch's bits only with the same steps. On all
// other CPUs, and for float64, this is the IEEE square root.
#pragma once

#include <cstddef>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

POSEIDON_INLINE float ieee_root(float value) { return __builtin_sqrtf(value); }
POSEIDON_INLINE double ieee_root(double value) { return __builtin_sqrt(value); }

/// roots[i] = √values[i]. The arrays do not overlap. An element's result depends only on its value.
void square_root(Isa isa, const float* values, float* roots, std::size_t element_count);
void square_root(Isa isa, const double* values, double* roots, std::size_t element_count);

}  // namespace poseidon::kernel
