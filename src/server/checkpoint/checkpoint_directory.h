// A directory of checkpoints, which all servers of a job share: who has written what, and what is whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "poseidon/checkpoint.h"
#include "poseidon/status.h"
#include "poseidon/update.h"
#include "server/checkpoint/checkpoint_file.h"

namespace poseidon {

/// A job's name as a part of file names: letters, digits, '_' and '-', anything else as %XX; long names end in a
/// checksum. Names from the network never become paths.
std::string checkpoint_file_job(const std::string& job);

/// What tells a job's checkpoints from those of a job of the same name under another secret (JobName).
std::string checkpoint_job(const std::string& name, const std::string& key_id);
/// The same for people.
std::string checkpoint_job_name(const std::string& job);

/// Makes the directory where it is not there. ErrorCode::invalid_argument where it cannot be used.
Status open_checkpoint_directory(const std::string& directory);

/// `writer` tells the cores of a job's servers apart.
std::string checkpoint_name(const std::string& job, std::uint64_t version, std::uint64_t run, std::uint64_t writer);

/// The files of one version, found by their names.
struct CheckpointPaths {
  std::string job;  // as in the names
  std::uint64_t version = 0;
  std::uint64_t run = 0;
  std::vector<std::string> paths;
  std::vector<std::string> unfinished;  // being written, or left by a server that died at it
};

/// Of one job, or of all where `job` is empty; by job, the newest first. ErrorCode::unreachable where the directory
/// cannot be read.
Result<std::vector<CheckpointPaths>> find_checkpoints(const std::string& directory, const std::string& job);

/// A piece of a unit, as it was.
struct RestoredPiece {
  std::vector<Buffer> arrays;  // none: it had no value
  std::uint64_t update_count = 0;
};

/// A complete version, open: pruning does not take it away. One thread.
class CheckpointVersion {
 public:
  /// ErrorCode::refused where chunks are missing, mismatch where a file is damaged or does not fit the others.
  static Result<CheckpointVersion> open(const CheckpointPaths& paths);

  const std::string& job() const { return job_; }
  std::uint64_t version() const { return version_; }
  std::uint64_t run() const { return run_; }
  const std::vector<CheckpointFile>& files() const { return files_; }
  std::size_t unit_count() const { return units_.size(); }

  /// Null where the version has no unit of this name.
  const CheckpointUnit* unit(const std::string& name) const;
  /// Bytes `offset` to `offset` + `size_bytes` of each of a unit's arrays, however the unit was cut when they were
  /// written. The unit is there and at least so large. ErrorCode::mismatch where a checksum is wrong.
  Result<RestoredPiece> read(const std::string& name, std::uint64_t offset, std::uint64_t size_bytes);

  /// Reads everything and renames what is damaged to NAME.damaged, so that no server takes the version for complete.
  void set_damaged_aside() const;

 private:
  struct Place {
    std::size_t file = 0;
    std::size_t record = 0;
  };
  struct Unit {
    CheckpointUnit about;
    std::map<std::uint32_t, Place> chunks;
  };

  CheckpointVersion() = default;
  Status add(CheckpointFile file);
  Status check_complete() const;
  /// The last chunk that was read stays: units may be cut finer now.
  Status load(Place place);

  std::uint64_t version_ = 0;
  std::uint64_t run_ = 0;
  std::string job_;
  std::vector<CheckpointFile> files_;
  std::map<std::string, Unit> units_;
  std::optional<std::pair<std::size_t, std::size_t>> loaded_;  // file and record
  std::vector<Buffer> loaded_arrays_;
};

/// A run of a job and the version that it went on from; 0: none.
struct CheckpointOrigin {
  std::uint64_t run = 0;
  std::uint64_t version = 0;
};

/// Removes the files of all versions that are older than the newest `keep` (at least 1) complete ones, and what runs
/// before that of `origin` have written of versions after it: this one has gone back behind them and makes them again.
void prune_checkpoints(const std::string& directory, const std::string& job, std::size_t keep,
                       const CheckpointOrigin& origin = {});

}  // namespace poseidon
