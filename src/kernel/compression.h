// Lossy compression of gradients with error feedback: a worker adds what it has not sent, the *residual*, to its next
// gradient. Pure arithmetic on float32, as in kernel.h; the bits do not depend on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/kernel.h"

namespace poseidon::kernel {

/// Takes the indexes.size() elements of gradient + residual of the largest magnitude, at most `element_count`. NaN is
/// larger than infinity. Of equal magnitudes the lowest indexes are taken. `indexes` gets the places, in ascending
/// order, and `values` the elements. The residual becomes gradient + residual, with zeros for what is taken. If an
/// element of gradient + residual is not finite, the residual stays as it is (source: Lin et al. 2018, "Deep Gradient
/// Compression").
void take_largest(const float* gradient, float* residual, std::size_t element_count, std::span<std::uint32_t> indexes,
                  float* values);

/// Elements [begin, end) of out: zeros, to which each term adds its elements, term after term, divided by `divisor` as
/// in `sum`. A term is rows of one float32. Disjoint ranges may run on different threads.
void sum_sparse(std::span<const RowTerm> terms, std::size_t begin, std::size_t end, unsigned divisor, float* out);

/// 1-bit quantization. A block has the signs of kOneBitValues values and two float32: the mean of its negative values
/// and the mean of its other values, for which the signs stand. The last block of an array is filled up with zeros,
/// which do not count. The layout of a block is the two means, and then the signs, the first value's in the lowest bit.
inline constexpr std::size_t kOneBitValues = 512;
inline constexpr std::size_t kOneBitBytes = 2 * sizeof(float) + kOneBitValues / 8;
/// Bytes of so many values.
constexpr std::size_t one_bit_bytes(std::size_t element_count) {
  return (element_count + kOneBitValues - 1) / kOneBitValues * kOneBitBytes;
}

/// out = gradient + residual in blocks. The residual becomes what that has lost. If a mean of a block is not finite,
/// the block stands for NaN, and its residual stays as it is (source: Seide et al. 2014, "1-Bit Stochastic Gradient
/// Descent").
void encode_one_bit(const float* gradient, float* residual, std::size_t element_count, std::byte* out);

/// Elements [begin, end) of out: the sum of the terms, which are whole arrays in blocks, term after term, divided by
/// `divisor` as in `sum`. `begin` is a multiple of kOneBitValues. Disjoint ranges may run on different threads.
void sum_one_bit(std::span<const std::byte* const> terms, std::size_t begin, std::size_t end, unsigned divisor,
                 float* out);

}  // namespace poseidon::kernel
