// The payload of a topk message: some elements of a gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "poseidon/status.h"

namespace poseidon::wire {

/// The places of the elements, in ascending order, 4 bytes each, and then as many float32 values. How many there are
/// follows from the plan. The header is that of a factors message.
struct TopK {
  std::span<const std::uint32_t> indexes;
  std::span<const std::byte> values;

  /// Returns the bytes of so many elements.
  static constexpr std::uint64_t payload_bytes(std::uint64_t count) { return count * 8; }
  /// `payload` has a multiple of 8 bytes, and lies at a multiple of 4. ErrorCode::mismatch: a place is not below
  /// `element_count`, or not above the place before it.
  static Result<TopK> read(std::span<const std::byte> payload, std::uint64_t element_count);
};

}  // namespace poseidon::wire
