// Shard: the chunks that one loop owns. Receives, reduces, updates and sends back without a lock
// (Parameter Hub §3.2.4: all of a chunk's work is done on its core).
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "server/chunk_state.h"
#include "server/shard_checkpoint.h"
#include "server/stored_chunk.h"
#include "transport/loop.h"

namespace poseidon {

/// Where a wide reduction runs: its threads, and the loop to come back to.
struct WideThreads {
  Executor* executor = nullptr;
  Loop* loop = nullptr;
};

/// Loop thread only. A refusal (ErrorCode::refused) concerns the message's sender alone.
class Shard {
 public:
  /// `wide` is used where reduction.aggregation says so; both must outlive the shard's last message. What the shard
  /// holds is charged to `budget`; it refuses what has no room in it.
  Shard(std::uint32_t worker_count, Reduction reduction, WideThreads wide,
        std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(0));
  ~Shard();
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  /// Saves what this shard stores and restores it. Before the first message.
  void set_checkpoint(std::unique_ptr<ShardCheckpoint> checkpoint) { checkpoint_ = std::move(checkpoint); }

  BufferPool& pool() { return *pool_; }
  /// Why `size_bytes` more are refused.
  Status no_room(std::uint64_t size_bytes) const;

  /// A contribution (push or factors) with a payload: its header has come. Returns where the payload goes;
  /// `progress` and `complete` follow, or `drop`.
  Result<std::span<std::byte>> begin(const wire::Header& header, Requester& from);
  void progress(const wire::Header& header, std::size_t received_bytes);
  void complete(const wire::Header& header);
  /// A contribution that is here as a whole: without payload, or lent until `release`. Refused: released.
  Status add(const wire::Header& header, Requester& from, std::span<const std::byte> payload,
             std::function<void()> release);

  /// The other requests. `payload` need not outlive the call.
  Status describe_units(std::span<const std::byte> payload);
  Status set_rule(const wire::Header& header, std::span<const std::byte> payload);
  Status assign(const wire::Header& header, std::span<const std::byte> payload);
  /// Answers at once, or when the chunk has got a value.
  Status pull(const wire::Header& header, Requester& from);

  /// A requester has gone: forgets what it contributed to unfinished chunks and what it asked for.
  void drop(const Requester& from);

  /// A step that is not complete.
  struct OpenChunk {
    wire::Header about;
    std::int64_t started_ns = 0;
    std::vector<std::uint32_t> missing_ranks;
  };
  /// Those that began before the given time.
  std::vector<OpenChunk> open_chunks(std::int64_t started_before_ns) const;

 private:
  struct PendingPull {
    wire::Header header;
    Requester* from = nullptr;
  };
  struct Entry {
    Entry(std::uint32_t worker_count, Reduction reduction, const std::shared_ptr<BufferPool>& pool)
        : state(worker_count, reduction, pool) {}
    ChunkState state;
    std::unique_ptr<StoredChunk> stored;  // null: nothing is kept between steps
    std::vector<PendingPull> pulls;
    bool computing = false;  // the wide baseline's threads are at work
    std::future<void> computed;
  };

  /// The chunk, new where it was unknown.
  Result<Entry*> open(const wire::Header& header);
  void forget(std::uint64_t key);
  void forget_if_unused(const wire::Header& header);
  Entry& entry_of(const wire::Header& header);
  StoredChunk& stored_of(Entry& entry);
  Result<Entry*> admit(const wire::Header& header, Requester& from);
  void finish_if_all_here(Entry& entry);
  void reduce_wide(Entry& entry);
  void finish(Entry& entry, Buffer sum);
  Result<std::shared_ptr<const Buffer>> store(Entry& entry, Buffer sum, const wire::Header& shape);
  void answer_pulls(Entry& entry);
  Status keep_rule(std::uint32_t unit, const UpdateRule& rule);
  Status restore(const wire::Header& header, Requester& from);

  const std::uint32_t worker_count_;
  const Reduction reduction_;
  const WideThreads wide_;
  const std::shared_ptr<BufferPool> pool_;
  const std::size_t entry_bytes_;                                     // what a chunk costs beside its data
  std::unordered_map<std::uint64_t, Entry> entries_;                  // by unit << 32 | chunk
  std::unordered_map<std::uint32_t, UpdateRule> rules_;               // by unit
  std::unique_ptr<ShardCheckpoint> checkpoint_;                       // null: nothing is saved
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from other threads
};

}  // namespace poseidon
