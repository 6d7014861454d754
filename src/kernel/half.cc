#include "kernel/half.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernel/half_bits.h"

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#elif POSEIDON_NEON
#include <arm_neon.h>
#endif

namespace poseidon::kernel {
namespace {

void widen_float16(const std::uint16_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(widen_float16_bits(in[i]));
}

void narrow_float16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = narrow_float16_bits(std::bit_cast<std::uint32_t>(in[i]));
}

void narrow_bfloat16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = narrow_bfloat16_bits(std::bit_cast<std::uint32_t>(in[i]));
}

/// What error feedback keeps of what rounding has lost.
POSEIDON_INLINE float kept(float lost) { return std::fabs(lost) <= std::numeric_limits<float>::max() ? lost : 0.0F; }

void narrow_float16_with_feedback(const float* in, float* residual, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const float wanted = in[i] + residual[i];
    out[i] = narrow_float16_bits(std::bit_cast<std::uint32_t>(wanted));
    residual[i] = kept(wanted - std::bit_cast<float>(widen_float16_bits(out[i])));
  }
}

#if POSEIDON_X86_DISPATCH
// Every CPU with AVX2 has F16C.
__attribute__((target("avx,f16c"))) void widen_float16_f16c(const std::uint16_t* in, float* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  widen_float16(in + i, out + i, n - i);
}

__attribute__((target("avx,f16c"))) void narrow_float16_f16c(const float* in, std::uint16_t* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  narrow_float16(in + i, out + i, n - i);
}

__attribute__((target("avx,f16c"))) void narrow_float16_with_feedback_f16c(const float* in, float* residual,
                                                                           std::uint16_t* out, std::size_t n) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  const __m256 largest = _mm256_set1_ps(std::numeric_limits<float>::max());
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 wanted = _mm256_add_ps(_mm256_loadu_ps(in + i), _mm256_loadu_ps(residual + i));
    const __m128i sent = _mm256_cvtps_ph(wanted, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 lost = _mm256_sub_ps(wanted, _mm256_cvtph_ps(sent));
    const __m256 finite = _mm256_cmp_ps(_mm256_andnot_ps(sign, lost), largest, _CMP_LE_OQ);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), sent);
    _mm256_storeu_ps(residual + i, _mm256_and_ps(finite, lost));
  }
  narrow_float16_with_feedback(in + i, residual + i, out + i, n - i);
}

// The compiler's own vectors of these loops reach 24 GB/s in the L2 cache, AVX2 as below 37, and AVX-512 as below 71.

/// The eight bfloat16 nearest to eight float32, each in the upper 16 bits of its place. The lower bits have any
/// content.
__attribute__((target("avx2"), always_inline)) inline __m256i round_to_bfloat16_avx2(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(static_cast<int>(kQuietBit)));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan));
}

__attribute__((target("avx2"))) void narrow_bfloat16_avx2(const float* in, std::uint16_t* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i low = _mm256_srli_epi32(round_to_bfloat16_avx2(_mm256_loadu_ps(in + i)), 16);
    const __m256i high = _mm256_srli_epi32(round_to_bfloat16_avx2(_mm256_loadu_ps(in + i + 8)), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), packed);
  }
  narrow_bfloat16(in + i, out + i, n - i);
}

__attribute__((target("avx512f,avx512bw"), always_inline)) inline __m512i round_to_bfloat16_avx512(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  // All elements are wanted. GCC 12 warns of the form without a mask.
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(static_cast<int>(kQuietBit)));
}

__attribute__((target("avx512f,avx512bw"))) void narrow_bfloat16_avx512(const float* in, std::uint16_t* out,
                                                                        std::size_t n) {
  alignas(64) std::uint16_t upper[32];  // the places of the upper 16 bits of two vectors
  for (std::uint16_t k = 0; k < 32; ++k) upper[k] = static_cast<std::uint16_t>(2 * k + 1);
  const __m512i places = _mm512_load_si512(upper);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i low = round_to_bfloat16_avx512(_mm512_loadu_ps(in + i));
    const __m512i high = round_to_bfloat16_avx512(_mm512_loadu_ps(in + i + 16));
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(low, places, high));
  }
  narrow_bfloat16(in + i, out + i, n - i);
}
#elif POSEIDON_NEON
void widen_float16_neon(const std::uint16_t* in, float* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(in + i))));
  widen_float16(in + i, out + i, n - i);
}

void narrow_float16_neon(const float* in, std::uint16_t* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i))));
  narrow_float16(in + i, out + i, n - i);
}

void narrow_float16_with_feedback_neon(const float* in, float* residual, std::uint16_t* out, std::size_t n) {
  const float32x4_t largest = vdupq_n_f32(std::numeric_limits<float>::max());
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float32x4_t wanted = vaddq_f32(vld1q_f32(in + i), vld1q_f32(residual + i));
    const float16x4_t sent = vcvt_f16_f32(wanted);
    const float32x4_t lost = vsubq_f32(wanted, vcvt_f32_f16(sent));
    const uint32x4_t finite = vcaleq_f32(lost, largest);
    vst1_u16(out + i, vreinterpret_u16_f16(sent));
    vst1q_f32(residual + i, vreinterpretq_f32_u32(vandq_u32(finite, vreinterpretq_u32_f32(lost))));
  }
  narrow_float16_with_feedback(in + i, residual + i, out + i, n - i);
}
#endif

}  // namespace

void widen(Isa isa, DType dtype, const std::byte* in_bytes, float* out, std::size_t element_count) {
  const auto* in = reinterpret_cast<const std::uint16_t*>(in_bytes);
  if (dtype == DType::bfloat16) {
    return run_with(
        isa, [=](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < element_count; ++i) out[i] = std::bit_cast<float>(widen_bfloat16_bits(in[i]));
        });
  }
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return widen_float16_f16c(in, out, element_count);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return widen_float16_neon(in, out, element_count);
#endif
  widen_float16(in, out, element_count);
}

void narrow(Isa isa, DType dtype, const float* in, std::byte* out_bytes, std::size_t element_count) {
  auto* out = reinterpret_cast<std::uint16_t*>(out_bytes);
  const bool to_bfloat16 = dtype == DType::bfloat16;
#if POSEIDON_X86_DISPATCH
  if (to_bfloat16 && isa == Isa::v4) return narrow_bfloat16_avx512(in, out, element_count);
  if (to_bfloat16 && isa == Isa::v3) return narrow_bfloat16_avx2(in, out, element_count);
  if (isa != Isa::baseline) return narrow_float16_f16c(in, out, element_count);
#elif POSEIDON_NEON
  if (!to_bfloat16 && isa == Isa::neon) return narrow_float16_neon(in, out, element_count);
#endif
  if (to_bfloat16) return narrow_bfloat16(in, out, element_count);
  narrow_float16(in, out, element_count);
}

void narrow_with_feedback(Isa isa, DType dtype, const float* in, float* residual, std::byte* out_bytes,
                          std::size_t element_count) {
  auto* out = reinterpret_cast<std::uint16_t*>(out_bytes);
  if (dtype == DType::bfloat16) {
    return run_with(
        isa, [=](auto) __attribute__((always_inline)) {
          POSEIDON_INDEPENDENT_ELEMENTS
          for (std::size_t i = 0; i < element_count; ++i) {
            const float wanted = in[i] + residual[i];
            const std::uint32_t rounded = round_to_bfloat16(std::bit_cast<std::uint32_t>(wanted));
            out[i] = static_cast<std::uint16_t>(rounded >> 16);
            residual[i] = kept(wanted - std::bit_cast<float>(rounded & 0xffff0000u));
          }
        });
  }
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return narrow_float16_with_feedback_f16c(in, residual, out, element_count);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return narrow_float16_with_feedback_neon(in, residual, out, element_count);
#endif
  narrow_float16_with_feedback(in, residual, out, element_count);
}

}  // namespace poseidon::kernel
