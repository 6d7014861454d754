// Coded payloads: on a network, the values of a large payload travel in fewer bytes (kernel/lossless.h).
//
// A payload is divided into segments of kSegmentBytes, the last one shorter. A segment travels as a length of 4 bytes
// and that many bytes: coded, or, where that has no fewer bytes, as it is. So a receiver knows what to wait for, needs
// memory for one segment, and has the values of each while the rest is on its way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/coding.h"
#include "poseidon/status.h"

namespace poseidon {

inline constexpr std::size_t kSegmentBytes = std::size_t{32} << 10;
inline constexpr std::size_t kSegmentHeadBytes = sizeof(std::uint32_t);
/// The most bytes of a segment on the wire, its head included.
inline constexpr std::size_t kMostSegmentBytes = kSegmentHeadBytes + kSegmentBytes;
/// The memory in which a segment is coded: some more, because it may turn out not to shrink.
inline constexpr std::size_t kSegmentRoomBytes = kMostSegmentBytes + 128;

/// Codes the payload of one message, segment after segment. It reads the sender's memory as late as it can.
class CodedPayload {
 public:
  /// `pieces` one after the other are values of `coding`, which is not Coding::none.
  CodedPayload(Coding coding, std::vector<std::span<const std::byte>> pieces);

  bool empty() const { return left_bytes_ == 0; }
  /// Bytes of the values that are not coded yet.
  std::size_t left_bytes() const { return left_bytes_; }

  /// Codes the next segment to `out`, which has kSegmentRoomBytes. Returns the bytes that travel. Not if empty().
  std::span<const std::byte> next(std::span<std::byte> out);

 private:
  std::span<const std::byte> take(std::size_t size_bytes);

  Coding coding_;
  std::vector<std::span<const std::byte>> pieces_;
  std::size_t piece_ = 0;  // the first that is not used up
  std::size_t left_bytes_ = 0;
  std::vector<std::byte> together_;  // a segment whose values lie in several pieces
};

/// Whether values that have so many bytes coded are worth the time to decode them.
constexpr bool is_worth_decoding(std::size_t coded_bytes, std::size_t plain_bytes) {
  return coded_bytes <= plain_bytes - plain_bytes / 32;
}

/// The memory in which a payload is coded.
constexpr std::size_t coded_room_bytes(std::size_t plain_bytes) {
  return (plain_bytes + kSegmentBytes - 1) / kSegmentBytes * kSegmentRoomBytes;
}

/// Codes all of a payload to `out`, which has coded_room_bytes. Returns what travels; nothing if its first segments
/// show that it is not worth it.
std::span<const std::byte> code_payload(Coding coding, std::span<const std::byte> values, std::span<std::byte> out);

/// How many bytes the segment at the front of `received` has on the wire, its head included; nothing while its head is
/// not there. ErrorCode::mismatch: none, or more than a segment of `plain_bytes` of values can have.
Result<std::optional<std::size_t>> segment_bytes(std::span<const std::byte> received, std::size_t plain_bytes);

/// Decodes a whole segment, its head included, to `values`, which is exactly as long as its values.
/// ErrorCode::mismatch: the bytes stand for no such values.
Status decode_segment(Coding coding, std::span<const std::byte> segment, std::span<std::byte> values);

}  // namespace poseidon
