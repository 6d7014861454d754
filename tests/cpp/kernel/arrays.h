// Arrays of any dtype for the kernel tests, and the slow exact casts with which the kernels are compared.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

using Bytes = std::vector<std::byte>;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Returns every instruction set that this CPU can run, baseline first.
inline std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::baseline};
  if (best_isa() == Isa::neon) isas.push_back(Isa::neon);
  if (best_isa() >= Isa::v3) isas.push_back(Isa::v3);
  if (best_isa() >= Isa::v4) isas.push_back(Isa::v4);
  return isas;
}

/// Returns the value of a 16-bit float with `mantissa_bits` below the exponent, by the definition of the format.
inline double half_value(std::uint16_t bits, int mantissa_bits) {
  const int exponent_max = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = (bits >> mantissa_bits) & exponent_max;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == exponent_max) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const int bias = exponent_max / 2;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// Returns the nearest 16-bit value, ties to even. It bisects over all finite values. `value` must not be NaN.
inline std::uint16_t nearest_half(double value, int mantissa_bits) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::fabs(value);
  const int infinity = ((1 << (15 - mantissa_bits)) - 1) << mantissa_bits;
  int below = 0;
  int above = infinity;
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    (half_value(static_cast<std::uint16_t>(middle), mantissa_bits) <= magnitude ? below : above) = middle;
  }
  const double low = half_value(static_cast<std::uint16_t>(below), mantissa_bits);
  // Infinity has the value of the next power of two here.
  const double high = above == infinity ? std::ldexp(1.0, (1 << (14 - mantissa_bits)))
                                        : half_value(static_cast<std::uint16_t>(above), mantissa_bits);
  const double middle = low + (high - low) / 2;
  const bool up = magnitude > middle || (magnitude == middle && below % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? above : below));
}

inline int mantissa_bits(DType dtype) { return dtype == DType::float16 ? 10 : 7; }

template <typename T>
T element(const std::byte* array, std::size_t index) {
  T value;
  std::memcpy(&value, array + index * sizeof(T), sizeof(T));
  return value;
}

/// Returns element `index` of an array of a floating dtype.
inline double value_at(const std::byte* array, DType dtype, std::size_t index) {
  if (dtype == DType::float32) return element<float>(array, index);
  if (dtype == DType::float64) return element<double>(array, index);
  return half_value(element<std::uint16_t>(array, index), mantissa_bits(dtype));
}

/// Rounds `value` to `dtype` and stores it at `index`.
inline void put(std::byte* array, DType dtype, std::size_t index, double value) {
  if (dtype == DType::float32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(array + index * sizeof narrow, &narrow, sizeof narrow);
  } else if (dtype == DType::float64) {
    std::memcpy(array + index * sizeof value, &value, sizeof value);
  } else {
    const std::uint16_t narrow = nearest_half(value, mantissa_bits(dtype));
    std::memcpy(array + index * sizeof narrow, &narrow, sizeof narrow);
  }
}

/// Returns normally distributed values, some of which are zero.
inline Bytes random_array(std::mt19937& random, DType dtype, std::size_t element_count) {
  std::normal_distribution<double> normal;
  Bytes array(element_count * dtype_bytes(dtype));
  for (std::size_t i = 0; i < element_count; ++i) put(array.data(), dtype, i, random() % 16 == 0 ? 0 : normal(random));
  return array;
}

}  // namespace poseidon::kernel
