// Conversion of one value of a 16-bit floating type to float32 and back, by integer operations.
#pragma once

#include <bit>
#include <cstdint>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

constexpr std::uint32_t kQuietBit = 0x400000u;

inline std::uint32_t widen_float16_bits(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? kQuietBit : 0);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  // A subnormal value is normalized, so that its leading one becomes the implicit bit.
  const auto shift = static_cast<std::uint32_t>(std::countl_zero(mantissa)) - 21;
  return sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3ffu) << 13);
}

inline std::uint16_t narrow_float16_bits(std::uint32_t bits) {
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

POSEIDON_INLINE std::uint32_t widen_bfloat16_bits(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits | kQuietBit : bits;
}

/// The bfloat16 nearest to a float32, in the upper 16 bits. The lower bits have any content.
POSEIDON_INLINE std::uint32_t round_to_bfloat16(std::uint32_t bits) {
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const std::uint32_t nan = bits | kQuietBit;  // rounding could carry a NaN into infinity
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

POSEIDON_INLINE std::uint16_t narrow_bfloat16_bits(std::uint32_t bits) {
  return static_cast<std::uint16_t>(round_to_bfloat16(bits) >> 16);
}

}  // namespace poseidon::kernel
