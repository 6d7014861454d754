// Sums of the 16-bit floating-point types. Values are widened in the registers and added in float32.
#pragma once

#include <cstddef>
#include <span>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// `sum` of kernel.h for float16 and bfloat16.
void sum_half(Isa isa, std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
              unsigned divisor);

/// `accumulate` of kernel.h for float16 and bfloat16.
void accumulate_half(Isa isa, const std::byte* input, float* sum, std::size_t element_count, DType dtype);

}  // namespace poseidon::kernel
