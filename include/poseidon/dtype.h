// Element types that tensors and wire messages may have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace poseidon {

/// The values are the wire format's (docs/wire-format.md): never renumber.
enum class DType : std::uint8_t {
  float32 = 1,
  float64 = 2,
  float16 = 3,
  bfloat16 = 4,
  uint8 = 5,
  int32 = 6,
  int64 = 7,
  int8_blocks = 8,  // float32 values on their way: 256 values rounded to 8 bits, with a common float32 scale
};

/// Bytes of one element; 0 for a value that is not a DType (as a decoder may see). An element of int8_blocks is a
/// block.
constexpr std::size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::uint8:
      return 1;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::int8_blocks:
      return 4 + 256;
  }
  return 0;
}

/// The values of one element: 256 for a block, and 1 for every other type.
constexpr std::size_t dtype_values(DType dtype) { return dtype == DType::int8_blocks ? 256 : 1; }

/// Bytes of a value in a large array of them.
constexpr double bytes_per_value(DType dtype) {
  return static_cast<double>(dtype_bytes(dtype)) / static_cast<double>(dtype_values(dtype));
}

/// Bytes of `value_count` values. The last block of int8_blocks is filled up.
constexpr std::size_t array_bytes(DType dtype, std::size_t value_count) {
  return (value_count + dtype_values(dtype) - 1) / dtype_values(dtype) * dtype_bytes(dtype);
}

/// Whether the elements are floating-point numbers. False for a value that is not a DType.
constexpr bool dtype_is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16 ||
         dtype == DType::int8_blocks;
}

/// "float32", … as numpy and PyTorch spell it; "unknown" otherwise.
std::string_view dtype_name(DType dtype);

}  // namespace poseidon
