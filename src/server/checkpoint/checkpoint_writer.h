// CheckpointWriter: the thread that writes a server's checkpoints while its cores go on.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/executor.h"
#include "base/pinned.h"
#include "server/checkpoint/checkpoint_file.h"

namespace poseidon {

/// Any thread may use it. There is one for all cores and jobs of a server, because a disk is fastest with one writer.
class CheckpointWriter : private Pinned {
 public:
  /// `keep` is the number of complete versions of a job that stay.
  CheckpointWriter(std::string directory, std::size_t keep);
  ~CheckpointWriter() { finish(); }

  const std::string& directory() const { return directory_; }

  /// Writes `snapshot` under `name`, after the snapshots that were given before. Then it passes the snapshot to
  /// `written` on the writer's thread, and prunes. An error becomes a notice. After `finish` the call only destroys
  /// `snapshot`.
  void write(CheckpointSnapshot snapshot, std::string name,
             std::function<void(std::shared_ptr<CheckpointSnapshot>)> written);

  /// Writes what was given and ends the thread. The loops that `written` posts to must still run. Only the first call
  /// has an effect.
  void finish();

  /// Adds a notice for the owner. If there are many notices, only the first ones are kept.
  void note(std::string text);
  std::vector<std::string> notices() const;

 private:
  void write_now(CheckpointSnapshot& snapshot, const std::string& name);

  const std::string directory_;
  const std::size_t keep_;
  mutable std::mutex mutex_;
  std::vector<std::string> notices_;    // under mutex_
  std::unique_ptr<Executor> executor_;  // under mutex_; null after `finish`
};

}  // namespace poseidon
