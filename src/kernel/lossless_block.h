// Helpers of the two kinds of lossless blocks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernel/bit_planes.h"
#include "kernel/dispatch.h"
#include "kernel/lossless.h"

namespace poseidon::kernel {

inline constexpr std::uint8_t kCodedBlock = 0x20;  // + the width
inline constexpr std::size_t kMostEscapes = 255;

/// A byte for each value of a block.
using BlockBytes = std::array<std::uint8_t, kBlockValues>;

/// Copies the bytes of a block. For so few a call of memcpy, or the instruction by which compilers replace it, takes
/// longer.
template <std::size_t size_bytes>
POSEIDON_INLINE void copy_block(const std::byte* from, std::byte* to) {
  constexpr std::size_t kStep = 64;
  static_assert(size_bytes % kStep == 0);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < size_bytes; i += kStep) std::memcpy(to + i, from + i, kStep);
}

/// Sets them to zero.
template <std::size_t size_bytes>
POSEIDON_INLINE void clear_block(std::byte* bytes) {
  constexpr std::size_t kStep = 64;
  static_assert(size_bytes % kStep == 0);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < size_bytes; i += kStep) std::memset(bytes + i, 0, kStep);
}

POSEIDON_INLINE std::uint8_t byte_at(const std::byte* at) { return std::to_integer<std::uint8_t>(*at); }

POSEIDON_INLINE std::uint8_t largest(const BlockBytes& bytes) {
  std::uint8_t most = 0;
  for (const std::uint8_t byte : bytes) most = byte > most ? byte : most;
  return most;
}

/// Of 128 bytes, so that compilers may count in bytes.
POSEIDON_INLINE std::uint8_t count_in_half(const std::uint8_t* bytes, std::uint8_t limit) {
  std::uint8_t count = 0;
  for (std::size_t i = 0; i < kBlockValues / 2; ++i) count = static_cast<std::uint8_t>(count + (bytes[i] >= limit));
  return count;
}

POSEIDON_INLINE std::size_t count_at_least(const BlockBytes& bytes, unsigned limit) {
  const auto least = static_cast<std::uint8_t>(limit);
  return std::size_t{count_in_half(bytes.data(), least)} + count_in_half(bytes.data() + kBlockValues / 2, least);
}

/// Calls `found(i)` for each byte that is `value`, in ascending order. There are few.
template <typename Found>
POSEIDON_INLINE void for_each_equal(const BlockBytes& bytes, std::uint8_t value, const Found& found) {
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  constexpr std::uint64_t kLow = 0x7f * kOnes;
  for (std::size_t i = 0; i < kBlockValues; i += sizeof(std::uint64_t)) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, bytes.data() + i, sizeof eight);
    eight ^= value * kOnes;
    // The highest bit of each byte that is 0.
    for (std::uint64_t zeros = ~(((eight & kLow) + kLow) | eight | kLow); zeros != 0; zeros &= zeros - 1)
      found(i + static_cast<std::size_t>(std::countr_zero(zeros)) / 8);
  }
}

}  // namespace poseidon::kernel
