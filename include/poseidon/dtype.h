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
};

/// Bytes of one element; 0 for a value that is not a DType (as a decoder may see).
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
  }
  return 0;
}

/// Whether the elements are floating-point numbers. False for a value that is not a DType.
constexpr bool dtype_is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16;
}

/// "float32", … as numpy and PyTorch spell it; "unknown" otherwise.
std::string_view dtype_name(DType dtype);

}  // namespace poseidon
