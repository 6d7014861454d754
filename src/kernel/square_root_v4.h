// The square roots of square_root.h for the 16 values of a register, for loops that go on computing with them.
#pragma once

#include <cstdint>

#include "kernel/dispatch.h"

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>

namespace poseidon::kernel {

/// How this CPU's square roots are rounded: correctly, or as PyTorch's library does it on AMD CPUs (`refined`) or on
/// Intel CPUs with AVX-512 (`refined_v4`). It depends on the CPU alone, and not on the instruction set that a test
/// chooses. So each value has one root.
enum class Rounding : std::uint8_t { ieee, refined, refined_v4 };
Rounding root_rounding();

constexpr std::size_t kV4Lanes = 16;
// GCC 12 takes the unmasked forms of some instructions for reads of a variable that is not set.
constexpr __mmask16 kAllLanes = 0xffff;

/// The lanes to which the refinements apply. They do not apply to zeros, subnormal and negative numbers, NaN, infinity,
/// and values with which a step overflows.
POSEIDON_INLINE __attribute__((POSEIDON_TARGET_V4)) __mmask16 usual_lanes(__m512 value) {
  return _mm512_cmp_ps_mask(value, _mm512_set1_ps(0x1p-126f), _CMP_GE_OQ) &
         _mm512_cmp_ps_mask(value, _mm512_set1_ps(0x1p127f), _CMP_LT_OQ);
}

/// One step from the RSQRTPS estimate for root and inverse root, then a correction of the root by its residual. No
/// multiply-add is fused.
POSEIDON_INLINE __attribute__((POSEIDON_TARGET_V4)) __m512 refined_root(__m512 value) {
  const __m512 half = _mm512_set1_ps(0.5f);
  const __m256 low = _mm256_rsqrt_ps(_mm512_maskz_extractf32x8_ps(0xff, value, 0));
  const __m256 high = _mm256_rsqrt_ps(_mm512_maskz_extractf32x8_ps(0xff, value, 1));
  const __m512 estimate = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  const __m512 root = _mm512_mul_ps(value, estimate);
  const __m512 half_inverse = _mm512_mul_ps(half, estimate);
  const __m512 error = _mm512_sub_ps(half, _mm512_mul_ps(root, half_inverse));
  const __m512 better_root = _mm512_add_ps(root, _mm512_mul_ps(root, error));
  const __m512 better_half_inverse = _mm512_add_ps(half_inverse, _mm512_mul_ps(half_inverse, error));
  const __m512 residual = _mm512_sub_ps(value, _mm512_mul_ps(better_root, better_root));
  return _mm512_add_ps(better_root, _mm512_mul_ps(residual, better_half_inverse));
}

/// A correction of the root from the VRSQRT14PS estimate by its residual, with fused multiply-adds.
POSEIDON_INLINE __attribute__((POSEIDON_TARGET_V4)) __m512 refined_root_v4(__m512 value) {
  const __m512 estimate = _mm512_maskz_rsqrt14_ps(kAllLanes, value);
  const __m512 root = _mm512_mul_ps(value, estimate);
  const __m512 residual = _mm512_fnmadd_ps(root, root, value);
  return _mm512_fmadd_ps(residual, _mm512_mul_ps(estimate, _mm512_set1_ps(0.5f)), root);
}

template <Rounding rounding>
POSEIDON_INLINE __attribute__((POSEIDON_TARGET_V4)) __m512 root_of(__m512 value) {
  if constexpr (rounding == Rounding::ieee) return _mm512_maskz_sqrt_ps(kAllLanes, value);
  const __m512 refined = rounding == Rounding::refined ? refined_root(value) : refined_root_v4(value);
  const __mmask16 usual = usual_lanes(value);
  if (usual == kAllLanes) return refined;
  return _mm512_mask_sqrt_ps(refined, static_cast<__mmask16>(~usual), value);
}

}  // namespace poseidon::kernel
#endif
