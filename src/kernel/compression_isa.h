// The kernels of compression.h with the instruction set chosen by the caller, so that tests can compare them.
#pragma once

#include "kernel/compression.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {

/// `take_largest` compiled for `isa`, which this CPU must have.
void take_largest_with(Isa isa, const float* gradient, float* residual, std::size_t element_count,
                       std::span<std::uint32_t> indexes, float* values);

/// `encode_one_bit` and `sum_one_bit` compiled for `isa`, which this CPU must have.
void encode_one_bit_with(Isa isa, const float* gradient, float* residual, std::size_t element_count, std::byte* out);
void sum_one_bit_with(Isa isa, std::span<const std::byte* const> terms, std::size_t begin, std::size_t end,
                      unsigned divisor, float* out);

}  // namespace poseidon::kernel
