// ShardCheckpoint: what a shard writes to checkpoints, when, and how it takes its chunks from one.
//
// A version is a step of the job: every chunk is taken as it was after its own step of that number, so that the cut is
// the same on all cores of all servers without a message between them (docs/decisions/0018-server-checkpoints.md).
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

/// Loop thread of its shard only.
class ShardCheckpoint {
 public:
  /// `job` tells it from all others that may use the directory. `writer` and `loop` outlive this. What it keeps is
  /// charged to `pool`, the shard's.
  ShardCheckpoint(CheckpointWriter& writer, std::string job, const Options& options, Loop& loop,
                  std::shared_ptr<BufferPool> pool);

  /// What the job's units are. Refused: what differs from what was said before.
  Status describe(const wire::StoredUnits& units);

  /// A value is about to be assigned. Refused where the directory holds checkpoints of the job that nobody asked for:
  /// this run would write its own among them.
  Status before_assign();
  /// It has been, to the chunk that the header names.
  void assigned(const wire::Envelope& header) { know(header); }

  /// What a chunk has been given by a checkpoint; version 0: there is none.
  struct Restored {
    std::uint64_t version = 0;
    std::optional<UpdateRule> rule;
  };
  /// Gives the chunk what the newest complete version up to header.step (0: of all; kNoVersion: of none) has for it. A
  /// version whose data is damaged counts as none. Refused: a unit that nobody has described, that the checkpoint has
  /// not, or has with another size or dtype; a chunk that has done steps; where all versions are damaged.
  Result<Restored> restore(const wire::Envelope& about, std::uint64_t version_limit, StoredChunk& chunk);

  /// A step of a stored chunk is complete; `shape` has its unit, chunk and step. `rule`: null for none.
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

  std::uint64_t interval_;  // of versions; doubled when the disk does not keep up
  std::uint64_t run_ = 0;
  std::uint64_t base_version_ = 0;  // that this run went on from: added to its steps
  bool may_assign_ = false;
  std::map<std::uint32_t, wire::StoredUnit> units_;      // by id
  std::unordered_map<std::uint32_t, UpdateRule> rules_;  // by unit, as of its last step
  std::map<ChunkKey, std::uint64_t> steps_;              // done by the chunks that have a value here
  std::optional<Collected> collected_;
  std::uint64_t last_version_ = 0;  // written or given up
  bool writing_ = false;

  std::optional<CheckpointVersion> source_;                    // that chunks are restored from
  std::uint64_t source_limit_ = 0;                             // that it was chosen for
  std::set<std::pair<std::uint64_t, std::uint64_t>> damaged_;  // versions and their runs

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from the writer
};

}  // namespace poseidon
