// 1-bit quantization: the sign of each value, and two means for each block.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/invariant.h"
#include "kernel/compression.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {
namespace {

// Sums are made in lanes, so that their bits do not depend on the width of vectors.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kWordBits = 32;
static_assert(kOneBitValues % kLanes == 0 && kOneBitValues % kWordBits == 0);

/// What the values of a block are decoded to.
struct Means {
  float negative = 0;
  float positive = 0;  // of zeros, too
};

using Block = std::array<float, kOneBitValues>;

/// The mean of the values that have the sign, of the first `count` of a block. NaN if it is not finite.
POSEIDON_INLINE float mean_of(const Block& values, bool negative, std::size_t count) {
  std::array<float, kLanes> sums{};
  std::array<float, kLanes> counts{};
  for (std::size_t i = 0; i < kOneBitValues; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const bool here = (values[i + lane] < 0) == negative && i + lane < count;
      sums[lane] += here ? values[i + lane] : 0.0F;
      counts[lane] += here ? 1.0F : 0.0F;
    }
  }
  float sum = 0;
  float number = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    sum += sums[lane];
    number += counts[lane];
  }
  const float mean = number > 0 ? sum / number : 0.0F;
  return std::fabs(mean) <= std::numeric_limits<float>::max() ? mean : std::numeric_limits<float>::quiet_NaN();
}

/// Encodes the first `count` values of a block, and makes `residual` what that loses of them.
POSEIDON_INLINE void encode_block(const Block& values, std::size_t count, float* residual, std::byte* out) {
  Means means{mean_of(values, true, count), mean_of(values, false, count)};
  // A value that is not finite makes a mean NaN. Then all values are decoded to NaN, and nothing is lost of them.
  const bool finite = !std::isnan(means.negative) && !std::isnan(means.positive);
  if (!finite) means.negative = means.positive = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(out, &means, sizeof means);
  std::array<std::uint32_t, kOneBitValues / kWordBits> words{};
  for (std::size_t w = 0; w < words.size(); ++w) {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < kWordBits; ++i) word |= (values[w * kWordBits + i] < 0 ? 0u : 1u) << i;
    words[w] = word;
  }
  std::memcpy(out + sizeof means, words.data(), sizeof words);
  if (!finite) return;
  for (std::size_t i = 0; i < count; ++i) residual[i] = values[i] - (values[i] < 0 ? means.negative : means.positive);
}

/// Adds the first `count` values of a block to `sums`.
POSEIDON_INLINE void add_block(const std::byte* block, std::size_t count, float* sums) {
  Means means;
  std::memcpy(&means, block, sizeof means);
  std::array<std::uint32_t, kOneBitValues / kWordBits> words{};
  std::memcpy(words.data(), block + sizeof means, sizeof words);
  for (std::size_t first = 0; first < count; first += kWordBits) {
    const std::uint32_t word = words[first / kWordBits];
    const std::size_t n = std::min(kWordBits, count - first);
    for (std::size_t i = 0; i < n; ++i) sums[first + i] += (word >> i & 1u) != 0 ? means.positive : means.negative;
  }
}

}  // namespace

void encode_one_bit(const float* gradient, float* residual, std::size_t element_count, std::byte* out, Isa isa) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        alignas(64) Block values;
        for (std::size_t first = 0; first < element_count; first += kOneBitValues) {
          const std::size_t count = std::min(kOneBitValues, element_count - first);
          for (std::size_t i = 0; i < count; ++i) values[i] = gradient[first + i] + residual[first + i];
          std::fill(values.begin() + static_cast<std::ptrdiff_t>(count), values.end(), 0.0F);
          encode_block(values, count, residual + first, out + first / kOneBitValues * kOneBitBytes);
        }
      });
}

void sum_one_bit(std::span<const std::byte* const> terms, std::size_t begin, std::size_t end, unsigned divisor,
                 float* out, Isa isa) {
  invariant(begin <= end && begin % kOneBitValues == 0, "a range of values begins with a block");
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        for (std::size_t first = begin; first < end; first += kOneBitValues) {
          const std::size_t count = std::min(kOneBitValues, end - first);
          float* const sums = out + first;
          std::fill(sums, sums + count, 0.0F);
          for (const std::byte* term : terms) add_block(term + first / kOneBitValues * kOneBitBytes, count, sums);
          auto* const bytes = reinterpret_cast<std::byte*>(sums);
          if (divisor > 1) finish_sum(bytes, bytes, count, DType::float32, divisor);
        }
      });
}

}  // namespace poseidon::kernel
