// Casts between the 16-bit floating types and float32.
#pragma once

#include <cstddef>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// out[i] = in[i], exact; `dtype` (of `in`) is float16 or bfloat16. A NaN keeps its sign and payload
/// and becomes quiet.
void widen(Isa isa, DType dtype, const std::byte* in, float* out, std::size_t element_count);

/// out[i] = in[i] rounded to nearest, ties to even; too large becomes infinity, a NaN stays one.
/// `dtype` (of `out`) is float16 or bfloat16.
void narrow(Isa isa, DType dtype, const float* in, std::byte* out, std::size_t element_count);

}  // namespace poseidon::kernel
