#include "kernel/half.h"

#include <bit>
#include <cstdint>

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#endif

namespace poseidon::kernel {
namespace {

constexpr std::uint32_t kQuietBit = 0x400000u;

std::uint32_t widen_float16_bits(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? kQuietBit : 0);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  // Subnormal: normalize, so that the leading one becomes the implicit bit.
  const auto shift = static_cast<std::uint32_t>(std::countl_zero(mantissa)) - 21;
  return sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3ffu) << 13);
}

std::uint16_t narrow_float16_bits(std::uint32_t bits) {
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000u) {  // NaN
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal as float16; a carry moves into the exponent as it should
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  } else if (magnitude > 0x33000000u) {  // above half of the smallest subnormal
    const std::uint32_t shift = 126 - (magnitude >> 23);
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t rest = significand & ((1u << shift) - 1);
    const std::uint32_t tie = 1u << (shift - 1);
    half = significand >> shift;
    if (rest > tie || (rest == tie && (half & 1u) != 0)) ++half;
  }
  return static_cast<std::uint16_t>(sign | half);
}

void widen_float16(const std::uint16_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(widen_float16_bits(in[i]));
}

void narrow_float16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = narrow_float16_bits(std::bit_cast<std::uint32_t>(in[i]));
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
#endif

POSEIDON_INLINE std::uint32_t widen_bfloat16_bits(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits | kQuietBit : bits;
}

POSEIDON_INLINE std::uint16_t narrow_bfloat16_bits(std::uint32_t bits) {
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits | kQuietBit) >> 16;  // rounding could carry a NaN into infinity
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

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
#endif
  widen_float16(in, out, element_count);
}

void narrow(Isa isa, DType dtype, const float* in, std::byte* out_bytes, std::size_t element_count) {
  auto* out = reinterpret_cast<std::uint16_t*>(out_bytes);
  if (dtype == DType::bfloat16) {
    return run_with(
        isa, [=](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < element_count; ++i) {
            out[i] = narrow_bfloat16_bits(std::bit_cast<std::uint32_t>(in[i]));
          }
        });
  }
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return narrow_float16_f16c(in, out, element_count);
#endif
  narrow_float16(in, out, element_count);
}

}  // namespace poseidon::kernel
