// The payloads of rows and topk messages: some rows of a gradient, and some elements of one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "poseidon/status.h"
#include "wire/messages/contribution.h"

namespace poseidon::wire {

/// The payload of a rows message: `factor_count` indexes in ascending order, zero bytes up to a multiple of 8 bytes,
/// and as many rows of `cols` values.
struct RowList {
  std::span<const std::uint32_t> indexes;
  std::span<const std::byte> values;

  /// Returns the bytes of so many indexes with the zeros that follow.
  static constexpr std::uint64_t index_bytes(std::uint64_t row_count) { return (row_count * 4 + 7) / 8 * 8; }
  /// Returns the bytes of the payload that `about` announces. Empty if it has more rows than the layer, or more than
  /// kMaxPayloadBytes.
  static std::optional<std::uint64_t> payload_bytes(const Contribution& about);
  /// `payload` has payload_bytes(about) bytes, and lies at a multiple of 4. ErrorCode::mismatch: an index is not below
  /// the layer's rows, or not above the index before it.
  static Result<RowList> read(const Contribution& about, std::span<const std::byte> payload);
};

/// The payload of a topk message: the places of some elements, in ascending order, 4 bytes each, and then as many
/// float32 values. How many there are follows from the plan. The header is that of a factors message.
struct TopK {
  std::span<const std::uint32_t> indexes;
  std::span<const std::byte> values;

  /// Returns the bytes of so many elements.
  static constexpr std::uint64_t payload_bytes(std::uint64_t count) { return count * 8; }
  /// `payload` has a multiple of 8 bytes, and lies at a multiple of 4. ErrorCode::mismatch: a place is not below
  /// `element_count`, or not above the place before it.
  static Result<TopK> read(std::span<const std::byte> payload, std::uint64_t element_count);
};

/// ErrorCode::mismatch: an index is not below `count`, or not above the index before it. `what` the indexes are of is
/// in the message.
Status check_indexes(std::span<const std::uint32_t> indexes, std::uint64_t count, const std::string& what = "row");

}  // namespace poseidon::wire
