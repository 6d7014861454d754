// units: rank 0 describes the units whose values the servers keep. A checkpoint needs the description, because ids and
// chunks depend on a job's plan and names do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/status.h"
#include "wire/messages/text_message.h"

namespace poseidon::wire {

/// A unit that is cut into chunks of `chunk_bytes`, of which the last may be smaller. The methods need a unit that
/// check_unit has accepted.
struct StoredUnit {
  std::uint32_t id = 0;
  DType dtype = DType::float32;
  std::uint64_t size_bytes = 0;
  std::uint64_t chunk_bytes = 0;
  std::string name;

  std::uint64_t chunk_count() const { return (size_bytes - 1) / chunk_bytes + 1; }
  /// Return where a chunk begins, and its size. `chunk` must be below chunk_count().
  std::uint64_t chunk_offset(std::uint64_t chunk) const { return chunk * chunk_bytes; }
  std::uint64_t chunk_size(std::uint64_t chunk) const {
    return chunk + 1 == chunk_count() ? size_bytes - chunk_offset(chunk) : chunk_bytes;
  }
  bool operator==(const StoredUnit&) const = default;
};

/// Longest name of a unit in messages and checkpoints; a longer one is cut.
inline constexpr std::size_t kMaxUnitNameBytes = 1024;

struct StoredUnits {
  std::uint64_t run = 0;           // of the job: later ones have higher numbers
  std::uint64_t base_version = 0;  // of the checkpoint that this run went on from; 0: none
  std::vector<StoredUnit> units;

  /// ErrorCode::mismatch: the payload is cut off; a unit has no elements; a dtype is unknown; or chunks are not whole
  /// elements, or more than a unit can have.
  static Result<StoredUnits> read(std::span<const std::byte> payload);
  /// Makes as many messages as the units need.
  std::vector<TextMessage> make(std::uint32_t rank) const;
};

/// ErrorCode::mismatch: the numbers make no valid unit; see StoredUnits::read.
Status check_unit(const StoredUnit& unit);

}  // namespace poseidon::wire
