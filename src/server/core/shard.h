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
#include "poseidon/client.h"
#include "server/checkpoint/shard_checkpoint.h"
#include "server/chunk/chunk_state.h"
#include "server/chunk/stored_chunk.h"
#include "server/core/threaded_sum.h"
#include "server/pace/pace.h"
#include "transport/loop.h"
#include "wire/messages/stored.h"

namespace poseidon {

/// Where a shard works.
struct ShardThreads {
  Loop* loop = nullptr;         // its own; null: it does all at once
  ThreadedSum* wide = nullptr;  // null: sums are made on the loop. Needs one
};

/// Loop thread only. A refusal (ErrorCode::refused) concerns the message's sender alone.
class Shard {
 public:
  /// What `threads` has must outlive the shard's last message. What the shard
  /// holds is charged to `budget`; it refuses what has no room in it.
  Shard(std::uint32_t worker_count, Reduction reduction, ShardThreads threads,
        std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(0));
  ~Shard();
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  /// Saves what this shard stores and restores it. Before the first message.
  void set_checkpoint(std::unique_ptr<ShardCheckpoint> checkpoint) { checkpoint_ = std::move(checkpoint); }

  /// Whom steps wait for: all ranks, unless this says otherwise. Before the first message. For `loop` and `on_notice`
  /// see PaceSurroundings.
  void set_pace(const wire::Pace& pace, Loop* loop, std::function<void(std::uint32_t, const std::string&)> on_notice);
  ShardPace& pace() { return *pace_; }

  BufferPool& pool() { return *pool_; }
  /// Why `size_bytes` more are refused.
  Status no_room(std::uint64_t size_bytes) const;

  /// Whether a contribution's payload may come now, or has to wait until others have come: what comes before its turn
  /// in the order of adding, since it would take the memory that those need which come first; and what finds no room
  /// that the end of others' will make.
  bool may_receive(const wire::Envelope& push) const;
  /// A contribution (push or factors) with a payload: its header has come. Returns where the payload goes;
  /// `progress` and `complete` follow, or `drop`.
  Result<std::span<std::byte>> begin(const wire::Contribution& push, Requester& from);
  void progress(const wire::Envelope& push, std::size_t received_bytes);
  void complete(const wire::Contribution& push);
  /// A contribution that is here as a whole: without payload, or lent until `release`. Refused: released.
  Status add(const wire::Contribution& push, Requester& from, std::span<const std::byte> payload,
             std::function<void()> release);

  /// The other requests. `payload` need not outlive the call.
  Status describe_units(std::span<const std::byte> payload);
  Status set_rule(const wire::Header& header, std::span<const std::byte> payload);
  Status assign(const wire::Header& header, std::span<const std::byte> payload);
  /// Answers at once, or when the chunk has got a value.
  Status pull(const wire::Header& header, Requester& from);

  /// A requester has gone: forgets what it contributed to unfinished chunks and what it asked for.
  void drop(const Requester& from);

  /// Those that began before the given time.
  std::vector<OpenChunk> open_chunks(std::int64_t started_before_ns) const;

 private:
  struct PendingPull {
    wire::Envelope about;
    wire::ArrayIndex array = 0;
    Requester* from = nullptr;
  };
  struct Entry final : PacedChunk {
    explicit Entry(Shard& its_shard);

    std::shared_ptr<const Buffer> value() override;
    bool has_rule(const wire::Contribution& push) const override;
    std::size_t update_bytes(const wire::Contribution& shape) const override;
    Status update(const wire::Contribution& shape, Buffer gradient) override;
    void finish_if_all_here() override;

    Shard& shard;
    const std::shared_ptr<ChunkPace> pace;
    std::unique_ptr<StoredChunk> stored;  // null: nothing is kept between steps
    std::vector<PendingPull> pulls;
    std::size_t needed_bytes = 0;  // by a step of it at least, whatever comes before its turn
    bool computing = false;        // threads of the wide baseline are at work, or a product has been begun
    std::future<void> computed;    // of those threads
  };

  struct Rule {
    UpdateRule rule;
    std::uint64_t step = 0;  // from which on it holds
  };

  static std::uint64_t key_of(const wire::Envelope& about) { return std::uint64_t{about.unit} << 32 | about.chunk; }
  /// The chunk, new where it was unknown.
  Result<Entry*> open(const wire::Envelope& about);
  void note_need(Entry& entry, const wire::Contribution& push);
  void forget(std::uint64_t key);
  void forget_if_unused(const wire::Envelope& about);
  Entry& entry_of(const wire::Envelope& about);
  StoredChunk& stored_of(Entry& entry);
  Result<Entry*> admit(const wire::Contribution& push, Requester& from);
  Result<Entry*> admit_lent(const wire::Contribution& push, Requester& from);
  void sum_on_threads(Entry& entry);
  void multiply(Entry& entry);
  struct Product;
  void multiply_rows(const std::shared_ptr<Product>& product);
  void finish(Entry& entry, Buffer sum);
  std::size_t update_bytes(const wire::Contribution& shape) const;
  Result<std::shared_ptr<const Buffer>> store(Entry& entry, Buffer sum, const wire::Contribution& shape);
  void answer_pulls(Entry& entry);
  Status keep_rule(std::uint64_t key, const Rule& rule);
  const UpdateRule* rule_of(const wire::Envelope& about) const;
  Status restore(const wire::Header& header, Requester& from);
  std::uint64_t rule_key(std::uint32_t unit, std::uint32_t rank) const;

  const std::uint32_t worker_count_;
  Reduction reduction_;
  const ShardThreads threads_;
  const std::shared_ptr<BufferPool> pool_;
  std::size_t entry_bytes_;                                            // what a chunk costs beside its data
  std::size_t needed_bytes_ = 0;                                       // of all entries
  std::size_t largest_part_bytes_ = 0;                                 // that has been admitted
  const std::shared_ptr<const bool> turn_ = std::make_shared<bool>();  // held by those whose memory will be free
  std::unique_ptr<ShardPace> pace_;
  std::unordered_map<std::uint64_t, Entry> entries_;  // by unit << 32 | chunk
  std::unordered_map<std::uint64_t, Rule> rules_;     // by rule_key
  std::unique_ptr<ShardCheckpoint> checkpoint_;       // null: nothing is saved

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from other threads
};

}  // namespace poseidon
