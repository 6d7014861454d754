// How few bytes numbers take when they are coded without loss (docs/coding.md).
#pragma once

#include <cstddef>
#include <span>

#include "poseidon/dtype.h"

namespace poseidon {

/// The bytes that `values`, numbers of `dtype`, take when they are coded in one piece. What is not coded takes what it
/// has. On the wire each 32 KiB take 4 bytes more. Any thread.
std::size_t coded_bytes(DType dtype, std::span<const std::byte> values);

/// The same of the differences by which they can be told to somebody who has `base`, which is as long as `values`.
std::size_t coded_difference_bytes(DType dtype, std::span<const std::byte> values, std::span<const std::byte> base);

}  // namespace poseidon
