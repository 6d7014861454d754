// Shard: the chunks that one loop owns. Receives, reduces and sends back without a lock
// (Parameter Hub §4.3: a chunk never leaves its core).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/buffer_pool.h"
#include "server/chunk_state.h"

namespace poseidon {

/// Loop thread only. Knows workers by rank; the server around it knows their flows.
class Shard {
 public:
  /// Sends a result to a rank: the header, and a payload that stays alive as long as the message
  /// needs it (empty when nobody contributed).
  using SendResult =
      std::function<void(std::uint32_t rank, const wire::Header& header, std::shared_ptr<Buffer> payload)>;

  Shard(std::uint32_t worker_count, SendResult send) : worker_count_(worker_count), send_(std::move(send)) {}

  BufferPool& pool() { return *pool_; }

  /// Takes one worker's contribution; when it is the last one, reduces and sends all results.
  /// ErrorCode::refused concerns that worker alone: the contribution is dropped (and released).
  Status add(Contribution contribution);

  /// Forgets what a rank contributed to unfinished chunks, because its connection has ended.
  void drop(std::uint32_t rank);

  /// A chunk that waits since before `started_before_ns`, with a text that names who is missing;
  /// called for every such chunk.
  void for_each_overdue(std::int64_t started_before_ns,
                        const std::function<void(const wire::Header& about, const std::string& why)>& visit) const;

 private:
  void finish(ChunkState& chunk);
  std::shared_ptr<Buffer> reduce(ChunkState& chunk, std::size_t size_bytes);
  void release(Contribution& contribution);

  std::uint32_t worker_count_;
  SendResult send_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::unordered_map<std::uint64_t, ChunkState> chunks_;  // by unit << 32 | chunk
};

}  // namespace poseidon
