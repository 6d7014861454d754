#include "kernel/half_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "kernel/arithmetic.h"
#include "kernel/half.h"
#include "kernel/half_bits.h"

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#elif POSEIDON_NEON
#include <arm_neon.h>
#endif

namespace poseidon::kernel {
namespace {

using Inputs = std::span<const std::byte* const>;

const std::uint16_t* half_values(const std::byte* array) { return reinterpret_cast<const std::uint16_t*>(array); }

template <DType dtype>
POSEIDON_INLINE float widen_value(std::uint16_t half) {
  return std::bit_cast<float>(dtype == DType::bfloat16 ? widen_bfloat16_bits(half) : widen_float16_bits(half));
}

/// Sums elements [first, element_count) one by one.
template <DType dtype>
void sum_elements(Inputs inputs, std::uint16_t* out, std::size_t first, std::size_t element_count,
                  const Divisor<float>& divisor) {
  for (std::size_t i = first; i < element_count; ++i) {
    float total = widen_value<dtype>(half_values(inputs[0])[i]);
    for (const std::byte* input : inputs.subspan(1)) total += widen_value<dtype>(half_values(input)[i]);
    divide(&total, 1, divisor);
    const auto bits = std::bit_cast<std::uint32_t>(total);
    out[i] = dtype == DType::bfloat16 ? narrow_bfloat16_bits(bits) : narrow_float16_bits(bits);
  }
}

template <DType dtype>
POSEIDON_INLINE void accumulate_elements(const std::uint16_t* input, float* sum, std::size_t n) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) sum[i] += widen_value<dtype>(input[i]);
}

// Two bfloat16 values are read as one 32-bit word. Its upper half is a float32 when the lower half is cleared. Its
// lower half is one when it is shifted up. So nothing has to move between the lanes of a vector.
struct [[gnu::packed, gnu::aligned(2), gnu::may_alias]] Word {
  std::uint32_t bits;
};

POSEIDON_INLINE float low_value(Word word) { return std::bit_cast<float>(word.bits << 16); }
POSEIDON_INLINE float high_value(Word word) { return std::bit_cast<float>(word.bits & 0xffff0000u); }

template <bool multiply, typename... Words>
POSEIDON_INLINE void add_words(Word* out, std::size_t word_count, float divisor, const Words*... in) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < word_count; ++i) {
    const float low = (... + low_value(in[i]));
    const float high = (... + high_value(in[i]));
    const float low_mean = multiply ? low * divisor : low / divisor;
    const float high_mean = multiply ? high * divisor : high / divisor;
    out[i].bits = (round_to_bfloat16(std::bit_cast<std::uint32_t>(low_mean)) >> 16) |
                  (round_to_bfloat16(std::bit_cast<std::uint32_t>(high_mean)) & 0xffff0000u);
  }
}

/// Sums up to kMaxArrays inputs. Returns the number of elements done: all of them, or one less if the number is odd.
std::size_t sum_bfloat16_words(Isa isa, Inputs inputs, std::byte* out_bytes, std::size_t element_count,
                               const Divisor<float>& divisor) {
  std::array<const Word*, kMaxArrays> arrays{};
  for (std::size_t i = 0; i < inputs.size(); ++i) arrays[i] = reinterpret_cast<const Word*>(inputs[i]);
  Word* const out = reinterpret_cast<Word*>(out_bytes);
  run_with(
      isa, [ =, count = inputs.size(), word_count = element_count / 2 ](auto) __attribute__((always_inline)) {
        with_arrays(
            arrays, count, [=](const auto*... in) __attribute__((always_inline)) {
              if (divisor.exact_reciprocal) return add_words<true>(out, word_count, divisor.reciprocal, in...);
              add_words<false>(out, word_count, divisor.denominator, in...);
            });
      });
  return element_count / 2 * 2;
}

#if POSEIDON_X86_DISPATCH
constexpr int kRoundToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
// Without a mask, these intrinsics make gcc 12 warn of uninitialized values in its own header.
constexpr __mmask16 kAllLanes = 0xffff;

__attribute__((POSEIDON_TARGET_V3, always_inline)) inline __m256 widen_256(__m128i halves) {
  return _mm256_cvtph_ps(halves);
}

__attribute__((POSEIDON_TARGET_V4, always_inline)) inline __m512 widen_512(__m256i halves) {
  return _mm512_maskz_cvtph_ps(kAllLanes, halves);
}

__attribute__((POSEIDON_TARGET_V3)) std::size_t sum_float16_v3(Inputs inputs, std::uint16_t* out,
                                                               std::size_t element_count,
                                                               const Divisor<float>& divisor) {
  const __m256 reciprocal = _mm256_set1_ps(divisor.reciprocal);
  const __m256 denominator = _mm256_set1_ps(divisor.denominator);
  std::size_t first = 0;
  for (; first + 32 <= element_count; first += 32) {
    __m256 sums[4];
    const auto* input = reinterpret_cast<const __m128i*>(half_values(inputs[0]) + first);
    for (std::size_t j = 0; j < 4; ++j) sums[j] = widen_256(_mm_loadu_si128(input + j));
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      input = reinterpret_cast<const __m128i*>(half_values(inputs[i]) + first);
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) sums[j] = _mm256_add_ps(sums[j], widen_256(_mm_loadu_si128(input + j)));
    }
    for (std::size_t j = 0; j < 4; ++j) {
      const __m256 mean =
          divisor.exact_reciprocal ? _mm256_mul_ps(sums[j], reciprocal) : _mm256_div_ps(sums[j], denominator);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + first) + j, _mm256_cvtps_ph(mean, kRoundToNearest));
    }
  }
  return first;
}

__attribute__((POSEIDON_TARGET_V4)) std::size_t sum_float16_v4(Inputs inputs, std::uint16_t* out,
                                                               std::size_t element_count,
                                                               const Divisor<float>& divisor) {
  const __m512 reciprocal = _mm512_set1_ps(divisor.reciprocal);
  const __m512 denominator = _mm512_set1_ps(divisor.denominator);
  std::size_t first = 0;
  for (; first + 128 <= element_count; first += 128) {
    __m512 sums[8];
    const auto* input = reinterpret_cast<const __m256i*>(half_values(inputs[0]) + first);
    for (std::size_t j = 0; j < 8; ++j) sums[j] = widen_512(_mm256_loadu_si256(input + j));
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      input = reinterpret_cast<const __m256i*>(half_values(inputs[i]) + first);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < 8; ++j) sums[j] = _mm512_add_ps(sums[j], widen_512(_mm256_loadu_si256(input + j)));
    }
    for (std::size_t j = 0; j < 8; ++j) {
      const __m512 mean =
          divisor.exact_reciprocal ? _mm512_mul_ps(sums[j], reciprocal) : _mm512_div_ps(sums[j], denominator);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + first) + j,
                          _mm512_maskz_cvtps_ph(kAllLanes, mean, kRoundToNearest));
    }
  }
  return first;
}

/// Returns the number of elements that were added, from the first on.
__attribute__((POSEIDON_TARGET_V3)) std::size_t accumulate_float16_v3(const std::uint16_t* input, float* sum,
                                                                      std::size_t element_count) {
  std::size_t i = 0;
  for (; i + 8 <= element_count; i += 8) {
    const __m256 values = widen_256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(input + i)));
    _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), values));
  }
  return i;
}

__attribute__((POSEIDON_TARGET_V4)) std::size_t accumulate_float16_v4(const std::uint16_t* input, float* sum,
                                                                      std::size_t element_count) {
  std::size_t i = 0;
  for (; i + 16 <= element_count; i += 16) {
    const __m512 values = widen_512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(input + i)));
    _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sum + i), values));
  }
  return i;
}
#elif POSEIDON_NEON
POSEIDON_INLINE float32x4_t widen_128(const std::uint16_t* halves) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

std::size_t sum_float16_neon(Inputs inputs, std::uint16_t* out, std::size_t element_count,
                             const Divisor<float>& divisor) {
  const float32x4_t denominator = vdupq_n_f32(divisor.denominator);
  std::size_t first = 0;
  for (; first + 16 <= element_count; first += 16) {
    float32x4_t sums[4];
    for (std::size_t j = 0; j < 4; ++j) sums[j] = widen_128(half_values(inputs[0]) + first + 4 * j);
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      const std::uint16_t* const input = half_values(inputs[i]) + first;
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) sums[j] = vaddq_f32(sums[j], widen_128(input + 4 * j));
    }
    for (std::size_t j = 0; j < 4; ++j) {
      const float32x4_t mean =
          divisor.exact_reciprocal ? vmulq_n_f32(sums[j], divisor.reciprocal) : vdivq_f32(sums[j], denominator);
      vst1_u16(out + first + 4 * j, vreinterpret_u16_f16(vcvt_f16_f32(mean)));
    }
  }
  return first;
}

std::size_t accumulate_float16_neon(const std::uint16_t* input, float* sum, std::size_t element_count) {
  std::size_t i = 0;
  for (; i + 4 <= element_count; i += 4) vst1q_f32(sum + i, vaddq_f32(vld1q_f32(sum + i), widen_128(input + i)));
  return i;
}
#endif

/// Sums with the CPU's conversions of such values. Returns the number of elements that were summed, from the first on.
std::size_t sum_float16_vectors(Isa isa, Inputs inputs, std::uint16_t* out, std::size_t element_count,
                                const Divisor<float>& divisor) {
#if POSEIDON_X86_DISPATCH
  if (isa == Isa::v4) return sum_float16_v4(inputs, out, element_count, divisor);
  if (isa == Isa::v3) return sum_float16_v3(inputs, out, element_count, divisor);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return sum_float16_neon(inputs, out, element_count, divisor);
#endif
  return 0;
}

std::size_t accumulate_float16_vectors(Isa isa, const std::uint16_t* input, float* sum, std::size_t element_count) {
#if POSEIDON_X86_DISPATCH
  if (isa == Isa::v4) return accumulate_float16_v4(input, sum, element_count);
  if (isa == Isa::v3) return accumulate_float16_v3(input, sum, element_count);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return accumulate_float16_neon(input, sum, element_count);
#endif
  return 0;
}

/// Sums any number of inputs through a running sum in the L1 cache.
void sum_bfloat16_blocks(Isa isa, Inputs inputs, std::byte* out, std::size_t element_count,
                         const Divisor<float>& divisor) {
  constexpr std::size_t block = 2048;
  alignas(64) float running[block];
  for (std::size_t first = 0; first < element_count; first += block) {
    const std::size_t n = std::min(block, element_count - first);
    const std::size_t offset_bytes = first * dtype_bytes(DType::bfloat16);
    widen(isa, DType::bfloat16, inputs[0] + offset_bytes, running, n);
    for (const std::byte* input : inputs.subspan(1)) {
      accumulate_half(isa, input + offset_bytes, running, n, DType::bfloat16);
    }
    run_with(
        isa, [ =, &divisor, values = running ](auto) __attribute__((always_inline)) { divide(values, n, divisor); });
    narrow(isa, DType::bfloat16, running, out + offset_bytes, n);
  }
}

}  // namespace

void sum_half(Isa isa, Inputs inputs, std::byte* out_bytes, std::size_t element_count, DType dtype, unsigned divisor) {
  const Divisor<float> division(divisor);
  auto* const out = reinterpret_cast<std::uint16_t*>(out_bytes);
  if (dtype == DType::float16) {
    const std::size_t done = sum_float16_vectors(isa, inputs, out, element_count, division);
    sum_elements<DType::float16>(inputs, out, done, element_count, division);
  } else if (inputs.size() <= kMaxArrays) {
    const std::size_t done = sum_bfloat16_words(isa, inputs, out_bytes, element_count, division);
    sum_elements<DType::bfloat16>(inputs, out, done, element_count, division);
  } else {
    sum_bfloat16_blocks(isa, inputs, out_bytes, element_count, division);
  }
}

void accumulate_half(Isa isa, const std::byte* input_bytes, float* sum, std::size_t element_count, DType dtype) {
  const std::uint16_t* const input = half_values(input_bytes);
  if (dtype == DType::bfloat16) {
    run_with(
        isa, [=](auto)
                 __attribute__((always_inline)) { accumulate_elements<DType::bfloat16>(input, sum, element_count); });
    return;
  }
  const std::size_t done = accumulate_float16_vectors(isa, input, sum, element_count);
  accumulate_elements<DType::float16>(input + done, sum + done, element_count - done);
}

}  // namespace poseidon::kernel
