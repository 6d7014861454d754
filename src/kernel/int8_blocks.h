// Blocks of 256 values that are rounded to 8 bits with a common scale (DType::int8_blocks).
//
// A block is a float32 scale and then 256 signed bytes; value i is scale · byte i. The scale is the largest magnitude
// in the block divided by 127. If a value of the block is infinite or NaN, the scale is NaN, so every value of the
// block is NaN on every rank. A last block that is not full is filled with zeros.
#pragma once

#include <cstddef>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

/// Rounds `value_count` values to nearest, ties to even. `out` has as many blocks as the values need. `out` may begin
/// where `in` begins.
void encode_int8(Isa isa, const float* in, std::byte* out, std::size_t value_count);

/// The same for in + residual. What the rounding has lost is then in `residual`; where a block is not finite, it is 0.
void encode_int8_with_feedback(Isa isa, const float* in, float* residual, std::byte* out, std::size_t value_count);

/// out[i] = value i. `in` may be the last bytes of `out`.
void decode_int8(Isa isa, const std::byte* in, float* out, std::size_t value_count);

/// sum[i] += value i. The arrays do not overlap.
void accumulate_int8(Isa isa, const std::byte* in, float* sum, std::size_t value_count);

}  // namespace poseidon::kernel
