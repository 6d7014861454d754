// Conversions of float32 values to the types in which they travel.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernel/dispatch.h"
#include "kernel/half.h"
#include "kernel/int8_blocks.h"
#include "kernel/kernel.h"
#include "kernel/kernel_isa.h"

namespace poseidon::kernel {
namespace {

// How many values are converted at a time where arrays overlap or intermediate values are needed. They stay in the L1
// cache, and are whole elements of every type.
constexpr std::size_t kBlock = 1024;

/// Whether the arrays share memory.
bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto* first = static_cast<const std::byte*>(a);
  const auto* second = static_cast<const std::byte*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

}  // namespace

void encode_with(Isa isa, DType dtype, const float* in, std::byte* out, std::size_t value_count) {
  if (dtype == DType::int8_blocks) return encode_int8(isa, in, out, value_count);
  if (!overlap(in, value_count * sizeof(float), out, value_count * dtype_bytes(dtype)))
    return narrow(isa, dtype, in, out, value_count);
  alignas(64) float values[kBlock];
  for (std::size_t first = 0; first < value_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, value_count - first);
    std::memcpy(values, in + first, n * sizeof(float));
    narrow(isa, dtype, values, out + first * dtype_bytes(dtype), n);
  }
}

void decode_with(Isa isa, DType dtype, const std::byte* in, float* out, std::size_t value_count) {
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

void encode_with_feedback_with(Isa isa, DType dtype, const float* in, float* residual, std::byte* out,
                               std::size_t value_count) {
  alignas(64) float wanted[kBlock];
  alignas(64) float sent[kBlock];
  for (std::size_t first = 0; first < value_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, value_count - first);
    float* const rest = residual + first;
    std::byte* const encoded = out + array_bytes(dtype, first);
    run_with(
        isa, [ n, rest, to = wanted, from = in + first ](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < n; ++i) to[i] = from[i] + rest[i];
        });
    encode_with(isa, dtype, wanted, encoded, n);
    decode_with(isa, dtype, encoded, sent, n);
    run_with(
        isa, [ n, rest, from = wanted, to = sent ](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < n; ++i) {
            const float lost = from[i] - to[i];
            rest[i] = std::fabs(lost) <= std::numeric_limits<float>::max() ? lost : 0.0F;
          }
        });
  }
}

void encode(DType dtype, const float* in, std::byte* out, std::size_t value_count) {
  encode_with(best_isa(), dtype, in, out, value_count);
}

void encode_with_feedback(DType dtype, const float* in, float* residual, std::byte* out, std::size_t value_count) {
  encode_with_feedback_with(best_isa(), dtype, in, residual, out, value_count);
}

void decode(DType dtype, const std::byte* in, float* out, std::size_t value_count) {
  decode_with(best_isa(), dtype, in, out, value_count);
}

}  // namespace poseidon::kernel
