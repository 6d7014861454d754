// Conversions of float32 values to the types in which they travel.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/invariant.h"
#include "kernel/dispatch.h"
#include "kernel/half.h"
#include "kernel/int8_blocks.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

// How many values are converted at a time where arrays overlap. They stay in the L1 cache.
constexpr std::size_t kBlock = 1024;

/// Whether the arrays share memory.
bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto* first = static_cast<const std::byte*>(a);
  const auto* second = static_cast<const std::byte*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

/// Calls `convert(values, first, n)` for one block after the other, with a copy of its values. So what it writes may
/// overlap the values.
template <typename Convert>
void in_blocks(const float* in, std::size_t value_count, const Convert& convert) {
  alignas(64) float values[kBlock];
  for (std::size_t first = 0; first < value_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, value_count - first);
    std::memcpy(values, in + first, n * sizeof(float));
    convert(values, first, n);
  }
}

}  // namespace

void encode(DType dtype, const float* in, std::byte* out, std::size_t value_count, Isa isa) {
  invariant(sums_in_float32(dtype), "float32 travels as a type of 16 or 8 bits");
  if (dtype == DType::int8_blocks) return encode_int8(isa, in, out, value_count);
  if (!overlap(in, value_count * sizeof(float), out, value_count * dtype_bytes(dtype)))
    return narrow(isa, dtype, in, out, value_count);
  in_blocks(in, value_count, [=](const float* values, std::size_t first, std::size_t n) {
    narrow(isa, dtype, values, out + first * dtype_bytes(dtype), n);
  });
}

void decode(DType dtype, const std::byte* in, float* out, std::size_t value_count, Isa isa) {
  invariant(sums_in_float32(dtype), "float32 travels as a type of 16 or 8 bits");
  if (dtype == DType::int8_blocks) return decode_int8(isa, in, out, value_count);
  if (!overlap(in, value_count * dtype_bytes(dtype), out, value_count * sizeof(float)))
    return widen(isa, dtype, in, out, value_count);
  alignas(64) std::byte halves[kBlock * sizeof(std::uint16_t)];
  for (std::size_t first = 0; first < value_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, value_count - first);
    std::memcpy(halves, in + first * dtype_bytes(dtype), n * dtype_bytes(dtype));
    widen(isa, dtype, halves, out + first, n);
  }
}

void encode_with_feedback(DType dtype, const float* in, float* residual, std::byte* out, std::size_t value_count,
                          Isa isa) {
  invariant(sums_in_float32(dtype), "float32 travels as a type of 16 or 8 bits");
  if (dtype == DType::int8_blocks) return encode_int8_with_feedback(isa, in, residual, out, value_count);
  if (!overlap(in, value_count * sizeof(float), out, value_count * dtype_bytes(dtype)))
    return narrow_with_feedback(isa, dtype, in, residual, out, value_count);
  in_blocks(in, value_count, [=](const float* values, std::size_t first, std::size_t n) {
    narrow_with_feedback(isa, dtype, values, residual + first, out + first * dtype_bytes(dtype), n);
  });
}

}  // namespace poseidon::kernel
