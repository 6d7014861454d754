// The kernels of compression.h with the instruction set chosen by the caller, so that tests can compare them.
#pragma once

#include "kernel/compression.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {

/// `take_largest` compiled for `isa`, which this CPU must have.
void take_largest_with(Isa isa, const float* gradient, float* residual, std::size_t element_count,
                       std::span<std::uint32_t> indexes, float* values);

}  // namespace poseidon::kernel
