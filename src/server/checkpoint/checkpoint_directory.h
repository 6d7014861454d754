// A directory of checkpoints, which all servers of a job share. It tells who has written which files and which versions
// are complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "poseidon/checkpoint.h"
#include "poseidon/status.h"
#include "server/checkpoint/checkpoint_file.h"

namespace poseidon {

/// Returns the job's name as a part of file names. Letters, digits, '_' and '-' stay; any other byte becomes %XX. A
/// long name is cut and ends in a checksum. So a name from the network never becomes a path.
std::string checkpoint_file_job(const std::string& job);

/// Returns the name under which a job's checkpoints are kept. It differs between jobs of one name under different
/// secrets (JobName).
std::string checkpoint_job(const std::string& name, const std::string& key_id);
/// Returns the same name in a form for messages to people.
std::string checkpoint_job_name(const std::string& job);

/// Creates the directory if it does not exist. ErrorCode::invalid_argument: the directory cannot be used.
Status open_checkpoint_directory(const std::string& directory);

/// Returns a checkpoint's file name. `writer` distinguishes the cores of a job's servers.
std::string checkpoint_name(const std::string& job, std::uint64_t version, std::uint64_t run, std::uint64_t writer);

/// The files of one version, found by their names.
struct CheckpointPaths {
  std::string job;  // as it is written in the file names
  std::uint64_t version = 0;
  std::uint64_t run = 0;
  std::vector<std::string> paths;
  std::vector<std::string> unfinished;  // files that are being written, or that a server left when it died
};

/// Finds the checkpoints of one job, or of all jobs if `job` is empty. They are sorted by job, the newest version
/// first. ErrorCode::unreachable: the directory cannot be read.
Result<std::vector<CheckpointPaths>> find_checkpoints(const std::string& directory, const std::string& job);

/// A part of a unit, as it was when the checkpoint was written.
struct RestoredPiece {
  std::vector<Buffer> arrays;  // empty if the part had no value
  std::uint64_t update_count = 0;
};

/// A complete version whose files are open, so that pruning does not take it away. Only one thread uses it.
class CheckpointVersion {
 public:
  /// ErrorCode::refused: chunks are missing. ErrorCode::mismatch: a file is damaged or does not fit the others.
  static Result<CheckpointVersion> open(const CheckpointPaths& paths);

  const std::string& job() const { return job_; }
  std::uint64_t version() const { return version_; }
  std::uint64_t run() const { return run_; }
  const std::vector<CheckpointFile>& files() const { return files_; }
  std::size_t unit_count() const { return units_.size(); }

  /// Returns null if the version has no unit of this name.
  const CheckpointUnit* unit(const std::string& name) const;
  /// Reads the bytes from `offset` to `offset` + `size_bytes` of each of a unit's arrays, whatever the unit's chunk
  /// size was when they were written. The unit must exist and must be at least this large. ErrorCode::mismatch: a
  /// checksum is wrong.
  Result<RestoredPiece> read(const std::string& name, std::uint64_t offset, std::uint64_t size_bytes);

  /// Reads everything and renames each damaged file to NAME.damaged, so that no server takes the version for complete.
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
  /// Keeps the chunk that was read last, because units may have smaller chunks now.
  Status load(Place place);

  std::uint64_t version_ = 0;
  std::uint64_t run_ = 0;
  std::string job_;
  std::vector<CheckpointFile> files_;
  std::map<std::string, Unit> units_;
  std::optional<std::pair<std::size_t, std::size_t>> loaded_;  // file and record
  std::vector<Buffer> loaded_arrays_;
  [[no_unique_address]] OneThread one_thread_{"CheckpointVersion"};
};

/// A run of a job, and the version from which it went on. Version 0 means that it began without one.
struct CheckpointOrigin {
  std::uint64_t run = 0;
  std::uint64_t version = 0;
};

/// Removes the files of all versions that are older than the newest `keep` (at least 1) complete ones. It also removes
/// the versions after that of `origin` that earlier runs have written: the run of `origin` has gone back behind them
/// and writes them again.
void prune_checkpoints(const std::string& directory, const std::string& job, std::size_t keep,
                       const CheckpointOrigin& origin = {});

}  // namespace poseidon
