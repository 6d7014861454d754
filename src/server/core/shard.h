// Shard: the chunks that one loop owns. Receives, reduces, updates and sends back without a lock
// (Parameter Hub §3.2.4: all of a chunk's work is done on its core).
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "poseidon/client.h"
#include "server/checkpoint/shard_checkpoint.h"
#include "server/chunk/chunk_state.h"
#include "server/chunk/stored_chunk.h"
#include "server/pace/arrivals.h"
#include "server/pace/late_results.h"
#include "server/pace/rank_clocks.h"
#include "transport/loop.h"
#include "wire/pace.h"

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

  /// Whom steps wait for. Before the first message. `loop`, which may be null, calls `end_late_steps` in time;
  /// `on_notice(rank, text)` is told once of each rank that is late in more than one of ten steps, and may be empty.
  void set_pace(const wire::Pace& pace, Loop* loop, std::function<void(std::uint32_t, const std::string&)> on_notice);
  /// stragglers=drop: ends the steps whose time is over at `time_ns` without those who are missing.
  void end_late_steps(std::int64_t time_ns);
  /// stragglers=drop: the ranks that steps have been ended without.
  std::vector<LateRank> late_ranks() const;

  BufferPool& pool() { return *pool_; }
  /// Why `size_bytes` more are refused.
  Status no_room(std::uint64_t size_bytes) const;

  /// Whether a contribution's payload may come now, or has to wait until others have come: what comes before its turn
  /// in the order of adding, since it would take the memory that those need which come first; and what finds no room
  /// that the end of others' will make.
  bool may_receive(const wire::Header& header) const;
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
  /// What stragglers=drop needs for a chunk.
  struct Late {
    Late(std::uint32_t worker_count, const std::shared_ptr<BufferPool>& pool)
        : arrivals(worker_count), results(worker_count, pool), late_steps(worker_count, 0) {}
    Arrivals arrivals;
    LateResults results;
    std::vector<std::uint64_t> late_steps;  // by rank: that have been ended without it
    std::int64_t deadline_ns = 0;           // of the open step, in `deadlines_`; 0: none yet, or it is over
    bool overdue = false;  // the open step waits for nobody any more, but for those that are too far behind
  };
  struct Entry {
    Entry(std::uint32_t worker_count, Reduction reduction, const std::shared_ptr<BufferPool>& pool)
        : state(worker_count, reduction, pool) {}
    ChunkState state;
    std::unique_ptr<StoredChunk> stored;  // null: nothing is kept between steps
    std::vector<PendingPull> pulls;
    std::unique_ptr<Late> late;          // null but with stragglers=drop
    std::unique_ptr<RankClocks> clocks;  // null but for stored chunks with consistency=ssp or async
    std::size_t needed_bytes = 0;        // by a step of it at least, whatever comes before its turn
    bool computing = false;              // threads of the wide baseline are at work, or a product has been begun
    std::future<void> computed;          // of those threads
  };

  struct Rule {
    UpdateRule rule;
    std::uint64_t step = 0;  // from which on it holds
  };

  static std::uint64_t key_of(const wire::Header& header) { return std::uint64_t{header.unit} << 32 | header.chunk; }
  /// The chunk, new where it was unknown.
  Result<Entry*> open(const wire::Header& header);
  void note_need(Entry& entry, const wire::Header& header);
  void forget(std::uint64_t key);
  void forget_if_unused(const wire::Header& header);
  Entry& entry_of(const wire::Header& header);
  StoredChunk& stored_of(Entry& entry);
  Result<Entry*> admit(const wire::Header& header, Requester& from);
  Result<Entry*> admit_lent(const wire::Header& header, Requester& from);
  void finish_if_all_here(Entry& entry);
  void reduce_wide(Entry& entry);
  void multiply(Entry& entry);
  struct Product;
  void multiply_rows(const std::shared_ptr<Product>& product);
  void finish(Entry& entry, Buffer sum);
  std::size_t update_bytes(const wire::Header& shape) const;
  Result<std::shared_ptr<const Buffer>> store(Entry& entry, Buffer sum, const wire::Header& shape);
  void answer_pulls(Entry& entry);
  Status keep_rule(std::uint64_t key, const Rule& rule);
  const UpdateRule* rule_of(const wire::Header& header) const;
  Status restore(const wire::Header& header, Requester& from);
  std::uint64_t rule_key(std::uint32_t unit, std::uint32_t rank) const;

  // shard_pace.cc: contributions that are in no step's sum, of late ranks and where steps do not exist.
  void prepare(Entry& entry, const wire::Header& header) const;
  static bool stands_apart(const Entry& entry, const wire::Header& header);
  Status admit_apart(Entry& entry, const wire::Header& header);
  PartsInFlight& parts_apart(Entry& entry) const;
  void complete_apart(Entry& entry, const wire::Header& header);
  void finish_apart(Entry& entry, const wire::Header& header, Requester& from, Buffer buffer,
                    std::span<const std::byte> payload);
  Status apply(Entry& entry, const wire::Header& header, Buffer buffer, std::span<const std::byte> payload);
  void answer_released(Entry& entry);
  void arrived(Entry& entry, std::uint32_t rank);
  void end_without_missing(Entry& entry);
  void step_ended(Entry& entry, const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload);
  void count_late(Late& late, std::uint32_t rank, std::uint64_t step);
  void set_deadline(std::uint64_t key, Late& late, std::int64_t time_ns);
  void clear_deadline(std::uint64_t key, Late& late);
  void wake_in_time();
  void drop_apart(std::uint64_t key, Entry& entry, const Requester& from);

  const std::uint32_t worker_count_;
  Reduction reduction_;
  const WideThreads wide_;
  const std::shared_ptr<BufferPool> pool_;
  std::size_t entry_bytes_;                                            // what a chunk costs beside its data
  std::size_t needed_bytes_ = 0;                                       // of all entries
  std::size_t largest_part_bytes_ = 0;                                 // that has been admitted
  const std::shared_ptr<const bool> turn_ = std::make_shared<bool>();  // held by those whose memory will be free
  std::unordered_map<std::uint64_t, Entry> entries_;                   // by unit << 32 | chunk
  std::unordered_map<std::uint64_t, Rule> rules_;                      // by rule_key
  std::unique_ptr<ShardCheckpoint> checkpoint_;                        // null: nothing is saved

  wire::Pace pace_;
  Loop* loop_ = nullptr;
  std::function<void(std::uint32_t, const std::string&)> on_notice_;
  // stragglers=drop.
  ArrivalSpread spread_;
  std::set<std::pair<std::int64_t, std::uint64_t>> deadlines_;  // of open steps: time in ns, chunk
  Loop::TimerId wake_timer_ = 0;                                // 0: none is set
  std::int64_t wakes_ns_ = INT64_MAX;                           // when `wake_timer_` goes off
  std::vector<LateRank> late_ranks_;                            // by rank
  std::vector<bool> noticed_;                                   // by rank

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from other threads
};

}  // namespace poseidon
