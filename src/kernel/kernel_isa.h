// The kernels of kernel.h with the instruction set chosen by the caller, so that tests can compare them.
#pragma once

#include "kernel/dispatch.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {

/// `sum` compiled for `isa`, which this CPU must have.
void sum_with(Isa isa, std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
              unsigned divisor);

/// The steps of a running sum compiled for `isa`, which this CPU must have.
void start_sum_with(Isa isa, const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype);
void accumulate_with(Isa isa, const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype);
void finish_sum_with(Isa isa, const std::byte* sum, std::byte* out, std::size_t element_count, DType dtype,
                     unsigned divisor);

/// The conversions compiled for `isa`, which this CPU must have.
void encode_with(Isa isa, DType dtype, const float* in, std::byte* out, std::size_t value_count);
void encode_with_feedback_with(Isa isa, DType dtype, const float* in, float* residual, std::byte* out,
                               std::size_t value_count);
void decode_with(Isa isa, DType dtype, const std::byte* in, float* out, std::size_t value_count);

/// `factor_product` compiled for `isa`, which this CPU must have.
void factor_product_with(Isa isa, std::span<const FactorTerm> terms, std::byte* out, DType dtype, std::size_t rows,
                         std::size_t cols, std::size_t row_begin, std::size_t row_end, unsigned divisor,
                         bool accumulate);

}  // namespace poseidon::kernel
