// The form of a checkpoint file (docs/checkpoints.md): a head that says what is in it, the arrays, a trailer.
// Bytes only: no files.
#pragma once

#include <array>
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
/// A longer head is no checkpoint's: whoever reads one takes no more memory than this.
inline constexpr std::uint64_t kMaxCheckpointHeadBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kMaxCheckpointVersion = UINT32_MAX;

/// A unit as the job knows it, whether or not this file has chunks of it. Its id is of no meaning here.
struct CheckpointUnit {
  wire::StoredUnit unit;
  UpdateRule rule;

  bool operator==(const CheckpointUnit&) const = default;
};

/// A chunk: `array_count` arrays of the chunk's size, the value first, then the state of its rule. None: the chunk had
/// no value yet.
struct CheckpointRecord {
  std::uint32_t unit = 0;  // index into CheckpointHead::units
  std::uint32_t chunk = 0;
  std::uint64_t update_count = 0;
  std::uint32_t array_count = 0;
  std::uint32_t checksum = 0;  // CRC-32C of the arrays, one after the other

  bool operator==(const CheckpointRecord&) const = default;
};

/// What one server core had when every chunk of it had done step `version` of the job.
struct CheckpointHead {
  std::string job;
  std::uint64_t version = 0;
  std::uint64_t run = 0;
  std::vector<CheckpointUnit> units;      // all of the job, by name each once
  std::vector<CheckpointRecord> records;  // in the order of their arrays in the file

  std::uint64_t array_bytes(const CheckpointRecord& record) const {
    return units[record.unit].unit.chunk_size(record.chunk);
  }
  std::uint64_t data_bytes(const CheckpointRecord& record) const { return record.array_count * array_bytes(record); }

  bool operator==(const CheckpointHead&) const = default;
};

/// Sizes that the first kCheckpointStartBytes of a file tell.
struct CheckpointSizes {
  std::uint64_t head_bytes = 0;
  std::uint64_t file_bytes = 0;
};

/// The head; as many bytes as its own sizes say.
std::string encode_checkpoint_head(const CheckpointHead& head);
/// What comes after the last array.
std::array<std::byte, kCheckpointTrailerBytes> encode_checkpoint_trailer(const CheckpointHead& head);

/// ErrorCode::mismatch, naming what is wrong, for a file that is none of these, of another format version, or whose
/// sizes cannot be.
Result<CheckpointSizes> decode_checkpoint_start(std::span<const std::byte> start);
/// `head` has head_bytes. ErrorCode::mismatch for a wrong checksum and for everything that does not fit together.
Result<CheckpointHead> decode_checkpoint_head(std::span<const std::byte> head);
/// ErrorCode::mismatch unless it is the trailer of a file with this head.
Status check_checkpoint_trailer(const CheckpointHead& head, std::span<const std::byte> trailer);

/// Of the whole file.
CheckpointSizes checkpoint_sizes(const CheckpointHead& head);

}  // namespace poseidon
