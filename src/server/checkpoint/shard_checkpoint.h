// ShardCheckpoint: decides what a shard writes to checkpoints and when, and restores its chunks from one.
//
// A version is a step of the job. Every chunk is saved as it was after its own step of that number. So the cut is the
// same on all cores of all servers without a message between them (docs/decisions/0018-server-checkpoints.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "poseidon/options.h"
#include "server/checkpoint/checkpoint_directory.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/chunk/stored_chunk.h"
#include "transport/loop.h"
#include "wire/header.h"
#include "wire/messages/units.h"

namespace poseidon {

/// Only the loop thread of its shard uses it.
class ShardCheckpoint {
 public:
  /// `job` distinguishes the job from all others that may use the directory. `writer` and `loop` must outlive this
  /// object. What it keeps is charged to `pool`, which is the shard's.
  ShardCheckpoint(CheckpointWriter& writer, std::string job, const Options& options, Loop& loop,
                  std::shared_ptr<BufferPool> pool);

  /// Describes the job's units. ErrorCode::refused: the description differs from an earlier one.
  Status describe(const wire::StoredUnits& units);

  /// Call it before a value is assigned. ErrorCode::refused: the directory holds checkpoints of the job that nobody
  /// asked to restore. This run would write its own checkpoints among them.
  Status before_assign();
  /// Notes that a value has been assigned to the chunk that the header names.
  void assigned(const wire::Envelope& header) {
    loop_.check_thread();
    know(header);
  }

  /// What a checkpoint has given a chunk. Version 0 means that there is no checkpoint.
  struct Restored {
    std::uint64_t version = 0;
    std::optional<UpdateRule> rule;
  };
  /// Gives the chunk its contents of the newest complete version up to `version_limit` (0: of all versions; kNoVersion:
  /// of none). A version whose data is damaged does not count. ErrorCode::refused: nobody has described the unit; the
  /// checkpoint does not have the unit, or has it with another size or dtype; the chunk has done steps already; or all
  /// versions are damaged.
  Result<Restored> restore(const wire::Envelope& about, std::uint64_t version_limit, StoredChunk& chunk);

  /// Notes that a step of a stored chunk is complete. `shape` has its unit, chunk and step. `rule` is null if there is
  /// none.
  void stepped(const wire::Envelope& shape, StoredChunk& chunk, const UpdateRule* rule);

 private:
  using ChunkKey = std::pair<std::uint32_t, std::uint32_t>;  // unit and chunk
  /// The version that is being collected.
  struct Collected {
    std::uint64_t version = 0;
    std::map<ChunkKey, CheckpointRecord> records;
    std::map<ChunkKey, std::vector<std::shared_ptr<const Buffer>>> arrays;
    std::size_t size_bytes = 0;
  };

  std::uint64_t* know(const wire::Envelope& header);
  bool due(std::uint64_t version);
  void begin(std::uint64_t version);
  void give_up(const std::string& why);
  void write();
  CheckpointVersion* newest(std::uint64_t limit, Status& problem);

  CheckpointWriter& writer_;
  const std::string job_;
  const std::uint64_t writer_id_;
  Loop& loop_;
  const std::shared_ptr<BufferPool> pool_;

  std::uint64_t interval_;  // steps between versions; doubled when the disk is too slow
  std::uint64_t run_ = 0;
  std::uint64_t base_version_ = 0;  // the version from which this run went on; it is added to the run's steps
  bool may_assign_ = false;
  std::map<std::uint32_t, wire::StoredUnit> units_;      // by id
  std::unordered_map<std::uint32_t, UpdateRule> rules_;  // by unit, as of its last step
  std::map<ChunkKey, std::uint64_t> steps_;              // the steps of the chunks that have a value here
  std::optional<Collected> collected_;
  std::uint64_t last_version_ = 0;  // the last version that was written or given up
  bool writing_ = false;

  std::optional<CheckpointVersion> source_;                    // the version from which chunks are restored
  std::uint64_t source_limit_ = 0;                             // the limit for which it was chosen
  std::set<std::pair<std::uint64_t, std::uint64_t>> damaged_;  // damaged versions and their runs

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from the writer
};

}  // namespace poseidon
