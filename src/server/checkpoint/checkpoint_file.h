// One checkpoint file: written as a whole or not at all, and read with every byte checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/file_descriptor.h"
#include "poseidon/status.h"
#include "server/checkpoint/checkpoint_format.h"

namespace poseidon {

/// What is to be written. The arrays must not change; their memory goes back to its pool on that pool's loop.
struct CheckpointSnapshot {
  CheckpointHead head;                                               // checksums are filled in when it is written
  std::vector<std::vector<std::shared_ptr<const Buffer>>> arrays{};  // of each record
  std::uint64_t base_version = 0;                                    // that the run went on from; not written
};

/// Writes `directory`/`name`, of mode 0600. Only a whole file, safe on the disk, ever has that name; whatever ends this
/// before leaves at most `name`.tmp. Blocks. ErrorCode::unreachable with the system's words.
Status write_checkpoint(const std::string& directory, const std::string& name, CheckpointSnapshot& snapshot);

/// A file that is open: it can be read even when it has been removed meanwhile. Movable.
class CheckpointFile {
 public:
  /// Reads the head and the trailer. ErrorCode::unreachable where it cannot be read, mismatch where it is damaged.
  static Result<CheckpointFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointHead& head() const { return head_; }

  /// The arrays of record `index`, once their checksum is right; ErrorCode::mismatch otherwise.
  Result<std::vector<Buffer>> read(std::size_t index) const;
  /// Reads all records for their checksums.
  Status verify() const;

 private:
  CheckpointFile(std::string path, FileDescriptor fd, CheckpointHead head, std::uint64_t data_offset);

  std::string path_;
  FileDescriptor fd_;
  CheckpointHead head_;
  std::vector<std::uint64_t> offsets_;  // of each record's arrays
};

}  // namespace poseidon
