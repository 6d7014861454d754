#include "kernel/int8_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "poseidon/dtype.h"

namespace poseidon::kernel {
namespace {

constexpr std::size_t kValues = dtype_values(DType::int8_blocks);
constexpr std::size_t kBlockBytes = dtype_bytes(DType::int8_blocks);
static_assert(kBlockBytes == sizeof(float) + kValues);

constexpr float kLevels = 127;
// Below this magnitude the reciprocal of the scale would overflow. Such values become zeros.
constexpr float kLeast = 1e-36F;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
// Adding this number rounds a small float32 to an integer, which is then in the low bits of the sum.
constexpr float kRounder = 12582912.0F;  // 1.5 · 2²³

/// The largest magnitude, as bits. Magnitudes are in the order of their bits, and NaN comes after infinity.
POSEIDON_INLINE std::uint32_t largest_bits(const float* values) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < kValues; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  return largest;
}

/// Asks for the values of a later block: the two passes over this one stay in the L1 cache, and memory would wait.
POSEIDON_INLINE void fetch_ahead(const float* values) {
  constexpr std::size_t line = 64 / sizeof(float);
  for (std::size_t i = 0; i < kValues; i += line) __builtin_prefetch(values + 2 * kValues + i);
}

/// Rounds to integers, whose low byte is that of the sum with kRounder.
POSEIDON_INLINE void round_values(const float* values, float factor, std::int8_t* out) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < kValues; ++i)
    out[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(values[i] * factor + kRounder));
}

/// Encodes kValues values, which do not overlap `out`. Returns the scale.
POSEIDON_INLINE float encode_block(const float* values, std::byte* out) {
  const std::uint32_t largest_magnitude = largest_bits(values);
  const auto largest = std::bit_cast<float>(largest_magnitude);
  auto* const rounded = reinterpret_cast<std::int8_t*>(out + sizeof(float));
  float scale = 0;
  if (largest_magnitude < kInfinityBits && largest >= kLeast) {
    scale = largest / kLevels;
    round_values(values, kLevels / largest, rounded);
  } else {
    if (largest_magnitude >= kInfinityBits) scale = std::numeric_limits<float>::quiet_NaN();
    std::memset(rounded, 0, kValues);
  }
  std::memcpy(out, &scale, sizeof(scale));
  return scale;
}

/// The same for `count` values, which may overlap `out`. Zeros fill the block.
POSEIDON_INLINE void encode_copy(const float* values, std::size_t count, std::byte* out) {
  alignas(64) std::array<float, kValues> copy{};
  std::memcpy(copy.data(), values, count * sizeof(float));
  encode_block(copy.data(), out);
}

/// Encodes the first `count` values + residual of a block, and keeps in `residual` what is lost.
POSEIDON_INLINE void encode_block_with_feedback(const float* values, float* residual, std::byte* out,
                                                std::size_t count) {
  alignas(64) std::array<float, kValues> wanted{};
  for (std::size_t i = 0; i < count; ++i) wanted[i] = values[i] + residual[i];
  const float scale = encode_block(wanted.data(), out);
  const auto* sent = reinterpret_cast<const std::int8_t*>(out + sizeof(scale));
  const bool finite = scale == scale;
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < count; ++i) residual[i] = finite ? wanted[i] - static_cast<float>(sent[i]) * scale : 0.0F;
}

POSEIDON_INLINE float scale_of(const std::byte* block) {
  float scale;
  std::memcpy(&scale, block, sizeof(scale));
  return scale;
}

/// Decodes the first `count` values of a block. The block is read before `out` is written.
POSEIDON_INLINE void decode_block(const std::byte* block, float* out, std::size_t count) {
  if (count == 0) return;
  alignas(64) std::array<std::int8_t, kValues> values{};
  const float scale = scale_of(block);
  std::memcpy(values.data(), block + sizeof(float), kValues);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(values[i]) * scale;
}

}  // namespace

void encode_int8(Isa isa, const float* in, std::byte* out, std::size_t value_count) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        // Only the first block may lie where its own values are: a block is smaller than they are.
        std::size_t first = std::min(kValues, value_count);
        if (first > 0) encode_copy(in, first, out);
        std::byte* block = out + kBlockBytes;
        for (; first + kValues <= value_count; first += kValues, block += kBlockBytes) {
          fetch_ahead(in + first);
          encode_block(in + first, block);
        }
        if (first < value_count) encode_copy(in + first, value_count - first, block);
      });
}

void encode_int8_with_feedback(Isa isa, const float* in, float* residual, std::byte* out, std::size_t value_count) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        std::byte* block = out;
        std::size_t first = 0;
        for (; first + kValues <= value_count; first += kValues, block += kBlockBytes) {
          fetch_ahead(in + first);
          fetch_ahead(residual + first);
          encode_block_with_feedback(in + first, residual + first, block, kValues);
        }
        if (first < value_count) encode_block_with_feedback(in + first, residual + first, block, value_count - first);
      });
}

void decode_int8(Isa isa, const std::byte* in, float* out, std::size_t value_count) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        const std::size_t full = value_count / kValues;
        const std::size_t rest = value_count % kValues;
        // A last block that is not full may lie where the block before it is written. So it is read first.
        std::array<std::byte, kBlockBytes> last{};
        if (rest > 0) std::memcpy(last.data(), in + full * kBlockBytes, kBlockBytes);
        for (std::size_t i = 0; i < full; ++i) decode_block(in + i * kBlockBytes, out + i * kValues, kValues);
        decode_block(last.data(), out + full * kValues, rest);
      });
}

void accumulate_int8(Isa isa, const std::byte* in, float* sum, std::size_t value_count) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        const std::byte* block = in;
        for (std::size_t first = 0; first < value_count; first += kValues, block += kBlockBytes) {
          const std::size_t n = std::min(kValues, value_count - first);
          const float scale = scale_of(block);
          const auto* values = reinterpret_cast<const std::int8_t*>(block + sizeof(float));
          float* const to = sum + first;
          POSEIDON_INDEPENDENT_ELEMENTS
          for (std::size_t i = 0; i < n; ++i) to[i] += static_cast<float>(values[i]) * scale;
        }
      });
}

}  // namespace poseidon::kernel
