// The format of a checkpoint file (docs/checkpoints.md): a head that describes the contents, the arrays, and a trailer.
// This code works on bytes only and opens no files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "poseidon/status.h"
#include "poseidon/update.h"
#include "wire/messages/units.h"

namespace poseidon {

inline constexpr std::size_t kCheckpointStartBytes = 56;
inline constexpr std::size_t kCheckpointTrailerBytes = 16;
/// No checkpoint has a longer head. So a reader takes no more memory than this for a head.
inline constexpr std::uint64_t kMaxCheckpointHeadBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kMaxCheckpointVersion = UINT32_MAX;

/// A unit as the job knows it, whether or not this file has chunks of it. The unit's id has no meaning here.
struct CheckpointUnit {
  wire::StoredUnit unit;
  UpdateRule rule;

  bool operator==(const CheckpointUnit&) const = default;
};

/// A chunk has `array_count` arrays of the chunk's size: first the value, then the state of its rule. The count is 0 if
/// the chunk had no value yet.
struct CheckpointRecord {
  std::uint32_t unit = 0;  // index into CheckpointHead::units
  std::uint32_t chunk = 0;
  std::uint64_t update_count = 0;
  std::uint32_t array_count = 0;
  std::uint32_t checksum = 0;  // CRC-32C of the arrays, one after the other

  bool operator==(const CheckpointRecord&) const = default;
};

/// The contents of one server core when every chunk of it had done step `version` of the job.
struct CheckpointHead {
  std::string job;
  std::uint64_t version = 0;
  std::uint64_t run = 0;
  std::vector<CheckpointUnit> units;      // all units of the job, each name once
  std::vector<CheckpointRecord> records;  // in the order of their arrays in the file

  std::uint64_t array_bytes(const CheckpointRecord& record) const {
    return units[record.unit].unit.chunk_size(record.chunk);
  }
  std::uint64_t data_bytes(const CheckpointRecord& record) const { return record.array_count * array_bytes(record); }

  bool operator==(const CheckpointHead&) const = default;
};

/// The sizes that the first kCheckpointStartBytes of a file give.
struct CheckpointSizes {
  std::uint64_t head_bytes = 0;
  std::uint64_t file_bytes = 0;
};

/// Returns the head's bytes. Their number is the one that the head itself gives.
std::string encode_checkpoint_head(const CheckpointHead& head);
/// Returns the bytes that follow the last array.
std::string encode_checkpoint_trailer(const CheckpointHead& head);

/// ErrorCode::mismatch: the file is no checkpoint, has another format version, or has impossible sizes. The text says
/// which.
Result<CheckpointSizes> decode_checkpoint_start(std::span<const std::byte> start);
/// `head` has head_bytes. ErrorCode::mismatch: the checksum is wrong, or the fields contradict each other.
Result<CheckpointHead> decode_checkpoint_head(std::span<const std::byte> head);
/// ErrorCode::mismatch: this is not the trailer of a file with this head.
Status check_checkpoint_trailer(const CheckpointHead& head, std::span<const std::byte> trailer);

/// Returns the sizes of the whole file.
CheckpointSizes checkpoint_sizes(const CheckpointHead& head);

}  // namespace poseidon
