// Helpers of the sums and of the other element-wise kernels.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

constexpr bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

/// Calls `function(T{})` with the C++ type of `dtype`, which must not be summed in float32. Integers are unsigned,
/// because unsigned integers wrap around by definition.
template <typename Function>
void with_element_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float32:
      return function(float{});
    case DType::float64:
      return function(double{});
    case DType::uint8:
      return function(std::uint8_t{});
    case DType::int32:
      return function(std::uint32_t{});
    case DType::int64:
      return function(std::uint64_t{});
    case DType::float16:
    case DType::bfloat16:
    case DType::int8_blocks:
      return;
  }
}

/// The most arrays that one loop reads. More would not fit the registers and prefetch streams of every CPU.
constexpr std::size_t kMaxArrays = 8;

/// Calls `function(arrays[0], …, arrays[count - 1])`, with count in [1, kMaxArrays]. Compilers turn a loop over named
/// pointers into vector code that keeps the sums in registers. They do not do so for any other form of the loop.
template <typename T, typename Function>
POSEIDON_INLINE void with_arrays(const std::array<const T*, kMaxArrays>& arrays, std::size_t count,
                                 const Function& function) {
  const auto [a, b, c, d, e, f, g, h] = arrays;
  switch (count) {
    case 1:
      return function(a);
    case 2:
      return function(a, b);
    case 3:
      return function(a, b, c);
    case 4:
      return function(a, b, c, d);
    case 5:
      return function(a, b, c, d, e);
    case 6:
      return function(a, b, c, d, e, f);
    case 7:
      return function(a, b, c, d, e, f, g);
    default:
      return function(a, b, c, d, e, f, g, h);
  }
}

/// A divisor of sums. It multiplies by the reciprocal if the reciprocal is exact, and divides otherwise. Integers are
/// not divided.
template <typename T>
struct Divisor {
  explicit Divisor(unsigned divisor)
      : none(divisor == 1 || !std::is_floating_point_v<T>),
        exact_reciprocal(std::has_single_bit(divisor)),
        denominator(static_cast<T>(divisor)),
        reciprocal(static_cast<T>(1 / static_cast<double>(divisor))) {}

  /// The factor by which the loop that adds multiplies the sum. `divide` does the rest.
  T factor() const { return exact_reciprocal ? reciprocal : T{1}; }

  bool none;
  bool exact_reciprocal;
  T denominator;
  T reciprocal;
};

template <typename T>
POSEIDON_INLINE void divide(T* values, std::size_t n, const Divisor<T>& divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    if (divisor.none) return;
    if (divisor.exact_reciprocal) {
      for (std::size_t i = 0; i < n; ++i) values[i] *= divisor.reciprocal;
    } else {
      for (std::size_t i = 0; i < n; ++i) values[i] /= divisor.denominator;
    }
  }
}

}  // namespace poseidon::kernel
