// What the values of an array are, for those who code them without loss (kernel/lossless.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace poseidon {

enum class Coding : std::uint8_t {
  none,  // they travel as they are
  float32,
  float16,
  bfloat16,
  difference32,  // small integers of 32 bits (kernel::difference)
  difference16,
  int8,  // bytes with signs (DType::int8_blocks)
};
inline constexpr Coding kLastCoding = Coding::int8;

/// Bytes of a value; 1 for Coding::none.
constexpr std::size_t value_bytes(Coding coding) {
  switch (coding) {
    case Coding::none:
    case Coding::int8:
      return 1;
    case Coding::float32:
    case Coding::difference32:
      return 4;
    default:
      return 2;
  }
}

/// As what the differences of two such arrays are coded (kernel::difference). Coding::none for what has none.
constexpr Coding difference_of(Coding coding) {
  if (value_bytes(coding) == 1) return Coding::none;
  return value_bytes(coding) == value_bytes(Coding::difference32) ? Coding::difference32 : Coding::difference16;
}

}  // namespace poseidon
