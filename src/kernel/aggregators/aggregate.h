// Runs an aggregator on arrays of any floating-point type.
#pragma once

#include <cstddef>
#include <span>

#include "poseidon/aggregate.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// out[i] = the aggregate of all inputs[…][i], divided by `divisor`. All arrays have `element_count` elements of
/// `dtype`, a floating-point type. An input that is null stands for zeros. `inputs` is not empty, and `out` is none of
/// them. 16-bit types are aggregated in float32 and rounded once at the end. The division is that of `sum` (kernel.h).
void aggregate(const Aggregator& aggregator, std::span<const std::byte* const> inputs, std::byte* out,
               std::size_t element_count, DType dtype, unsigned divisor);

}  // namespace poseidon::kernel
