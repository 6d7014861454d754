// How few bytes numbers take when they are coded without loss (docs/coding.md).
#pragma once

#include <cstddef>
#include <span>

#include "poseidon/dtype.h"

namespace poseidon {

/// The bytes that `values` take coded in one piece: numbers of `dtype`, of which only float32, float16 and bfloat16 are
/// coded, and others take what they have. `values` has whole numbers. On the wire each 32 KiB take 4 bytes more. Any
/// thread.
std::size_t coded_bytes(DType dtype, std::span<const std::byte> values);

/// The same of the differences by which they can be told to somebody who has `base`, which is as long as `values`.
std::size_t coded_difference_bytes(DType dtype, std::span<const std::byte> values, std::span<const std::byte> base);

}  // namespace poseidon
