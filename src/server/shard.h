// Shard: the chunks that one loop owns. Receives, reduces, updates and sends back without a lock
// (Parameter Hub §3.2.4: all of a chunk's work is done on its core).
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "server/chunk_state.h"
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
  /// `wide` is used where reduction.aggregation says so; both must outlive the shard's last message.
  Shard(std::uint32_t worker_count, Reduction reduction, WideThreads wide);
  ~Shard();
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  BufferPool& pool() { return *pool_; }

  /// A contribution (push or factors) with a payload: its header has come. Returns where the payload goes;
  /// `progress` and `complete` follow, or `drop`.
  Result<std::span<std::byte>> begin(const wire::Header& header, Requester& from);
  void progress(const wire::Header& header, std::size_t received_bytes);
  void complete(const wire::Header& header);
  /// A contribution that is here as a whole: without payload, or lent until `release`. Refused: released.
  Status add(const wire::Header& header, Requester& from, std::span<const std::byte> payload,
             std::function<void()> release);

  /// The other requests. `payload` need not outlive the call.
  Status set_rule(const wire::Header& header, std::span<const std::byte> payload);
  Status assign(const wire::Header& header, std::span<const std::byte> payload);
  /// Answers at once, or when the chunk has got a value.
  Status pull(const wire::Header& header, Requester& from);

  /// A requester has gone: forgets what it contributed to unfinished chunks and what it asked for.
  void drop(const Requester& from);

  /// A chunk that waits since before `started_before_ns`, with a text that names who is missing;
  /// called for every such chunk.
  void for_each_overdue(std::int64_t started_before_ns,
                        const std::function<void(const wire::Header& about, const std::string& why)>& visit) const;

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

  Entry& entry_of(const wire::Header& header);
  StoredChunk& stored_of(Entry& entry);
  Result<Entry*> admit(const wire::Header& header, Requester& from);
  void finish_if_all_here(Entry& entry);
  void reduce_wide(Entry& entry);
  void finish(Entry& entry, Buffer sum);
  std::shared_ptr<const Buffer> store(Entry& entry, Buffer sum, const wire::Header& shape);
  void answer_pulls(Entry& entry);

  const std::uint32_t worker_count_;
  const Reduction reduction_;
  const WideThreads wide_;
  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::unordered_map<std::uint64_t, Entry> entries_;                  // by unit << 32 | chunk
  std::unordered_map<std::uint32_t, UpdateRule> rules_;               // by unit
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from other threads
};

}  // namespace poseidon
