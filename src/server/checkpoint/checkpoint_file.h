// One checkpoint file. It is written as a whole or not at all, and every byte is checked when it is read.
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

/// What is to be written. The arrays must not change. Their memory goes back to its pool on that pool's loop.
struct CheckpointSnapshot {
  CheckpointHead head;  // the checksums are filled in when the file is written
  std::vector<std::vector<std::shared_ptr<const Buffer>>> arrays{};  // the arrays of each record
  std::uint64_t base_version = 0;  // the version from which the run went on; it is not written
};

/// Writes `directory`/`name` with mode 0600. Only a complete file that is safe on the disk ever has that name. A crash
/// or an error leaves at most `name`.tmp. The call blocks. ErrorCode::unreachable: the write failed; the text is the
/// system's.
Status write_checkpoint(const std::string& directory, const std::string& name, CheckpointSnapshot& snapshot);

/// An open file. It can be read even if it has been removed meanwhile. Movable.
class CheckpointFile {
 public:
  /// Reads the head and the trailer. ErrorCode::unreachable: the file cannot be read. ErrorCode::mismatch: it is
  /// damaged.
  static Result<CheckpointFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointHead& head() const { return head_; }

  /// Returns the arrays of record `index`. ErrorCode::mismatch: their checksum is wrong.
  Result<std::vector<Buffer>> read(std::size_t index) const;
  /// Reads all records and checks their checksums.
  Status verify() const;

 private:
  CheckpointFile(std::string path, FileDescriptor fd, CheckpointHead head, std::uint64_t data_offset);

  std::string path_;
  FileDescriptor fd_;
  CheckpointHead head_;
  std::vector<std::uint64_t> offsets_;  // where each record's arrays begin
};

}  // namespace poseidon
