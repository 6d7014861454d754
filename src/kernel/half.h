// Casts between the 16-bit floating types and float32.
#pragma once

#include <cstddef>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// out[i] = in[i], which is exact. `dtype` is that of `in`: float16 or bfloat16. A NaN keeps its sign and payload and
/// becomes quiet.
void widen(Isa isa, DType dtype, const std::byte* in, float* out, std::size_t element_count);

/// out[i] = in[i] rounded to nearest, ties to even. Too large values become infinity, and a NaN stays a NaN. `dtype` is
/// that of `out`: float16 or bfloat16.
void narrow(Isa isa, DType dtype, const float* in, std::byte* out, std::size_t element_count);

/// The same for in + residual. What the rounding has lost is then in `residual`; where that is not finite, it is 0. The
/// arrays do not overlap.
void narrow_with_feedback(Isa isa, DType dtype, const float* in, float* residual, std::byte* out,
                          std::size_t element_count);

}  // namespace poseidon::kernel
