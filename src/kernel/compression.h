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
                  float* values, Isa isa = best_isa());

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
void encode_one_bit(const float* gradient, float* residual, std::size_t element_count, std::byte* out,
                    Isa isa = best_isa());

/// Elements [begin, end) of out: the sum of the terms, which are whole arrays in blocks, term after term, divided by
/// `divisor` as in `sum`. `begin` is a multiple of kOneBitValues. Disjoint ranges may run on different threads.
void sum_one_bit(std::span<const std::byte* const> terms, std::size_t begin, std::size_t end, unsigned divisor,
                 float* out, Isa isa = best_isa());

/// Low-rank compression of an M×N matrix: `rank` left vectors of length M and as many right vectors of length N, one
/// after the other (source: Vogels et al. 2019, "PowerSGD"). `gradient` may be null in `subtract_low_rank` only.
struct LowRank {
  std::size_t rows = 0;  // M
  std::size_t cols = 0;  // N
  std::size_t rank = 0;
};

/// left_k[i] = Σ_j (gradient + residual)[i][j] · right_k[j], for rows [begin, end). Disjoint ranges may run on
/// different threads.
void multiply_right(const LowRank& shape, const float* gradient, const float* residual, const float* right,
                    std::size_t begin, std::size_t end, float* left);

/// right_k[j] = Σ_i (gradient + residual)[i][j] · left_k[i], for columns [begin, end), added in the order of the rows.
/// Disjoint ranges may run on different threads.
void multiply_left(const LowRank& shape, const float* gradient, const float* residual, const float* left,
                   std::size_t begin, std::size_t end, float* right);

/// Makes the vectors orthogonal to each other and of length 1, by the modified Gram-Schmidt process. A vector that
/// depends on those before it becomes zeros. Returns false, and the vectors are undefined, if one is not finite.
bool orthonormalize(std::size_t count, std::size_t length, float* vectors);

/// Makes each vector one of length 1. Vectors of zeros become pseudo-random ones, which depend on their place alone.
void refresh(std::size_t count, std::size_t length, float* vectors);

/// For rows [begin, end): residual += gradient − Σ_k left_k·own_k (if the gradient is not null), and then
/// out[i][j] = (Σ_k left_k[i]·total_k[j]) / divisor, each element one chain in the order of k, divided as in `sum`.
/// `out` may be the gradient. Disjoint ranges may run on different threads.
void subtract_low_rank(const LowRank& shape, const float* gradient, float* residual, const float* left,
                       const float* own, const float* total, std::size_t begin, std::size_t end, unsigned divisor,
                       float* out);

}  // namespace poseidon::kernel
