// Shard: the chunks that one loop owns. It receives, reduces, updates and sends back without a lock, because all work
// on a chunk is done on its core (Parameter Hub §3.2.4).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "base/one_thread.h"
#include "base/pinned.h"
#include "base/thread.h"
#include "poseidon/client.h"
#include "poseidon/features.h"
#include "server/checkpoint/shard_checkpoint.h"
#include "server/chunk/chunk_state.h"
#include "server/chunk/stored_chunk.h"
#include "server/chunk/update_base.h"
#include "server/core/threaded_sum.h"
#include "server/pace/pace.h"
#include "transport/loop.h"
#include "wire/messages/stored.h"

namespace poseidon {

/// The threads on which a shard works.
struct ShardThreads {
  Loop* loop = nullptr;         // the shard's loop; null: all work is done at once
  ThreadedSum* wide = nullptr;  // null: sums are made on the loop; if set, `loop` must be set
};

/// Only the loop thread uses it. ErrorCode::refused concerns only the sender of the message.
class Shard : private Pinned {
 public:
  /// The objects of `threads` must outlive the shard's last message. What the shard holds is charged to `budget`. The
  /// shard refuses what has no room there.
  Shard(std::uint32_t worker_count, Reduction reduction, ShardThreads threads,
        std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(0));
  ~Shard();

  /// Sets what saves and restores the values that this shard stores. Call it before the first message.
  void set_checkpoint(std::unique_ptr<ShardCheckpoint> checkpoint) { checkpoint_ = std::move(checkpoint); }

  /// Says that contributions are sums of machines, so that no aggregator can have each worker's own gradient. Call it
  /// before the first message.
  void take_machines() { features_.add(Feature::sums_of_machines); }

  /// Sets whom steps wait for; by default they wait for all ranks. Call it before the first message. For `loop` and
  /// `on_notice` see PaceSurroundings.
  void set_pace(const wire::Pace& pace, Loop* loop, std::function<void(std::uint32_t, const std::string&)> on_notice);
  ShardPace& pace() { return *pace_; }

  BufferPool& pool() { return *pool_; }
  const MemoryBudget& budget() const { return pool_->budget(); }
  /// Returns the refusal of `size_bytes` more.
  Status no_room(std::uint64_t size_bytes) const;

  /// Whether a contribution's payload may come now. Otherwise it has to wait until others have come. There are two
  /// reasons to wait. It may be too early in the order of adding, and would take the memory that earlier contributions
  /// need. Or there is no room for it until others have ended.
  bool may_receive(const wire::Envelope& push) const;
  /// Begins a contribution with a payload whose header has come. Returns the memory for the payload. The caller then
  /// calls `progress` and `complete`, or `drop`.
  Result<std::span<std::byte>> begin(const wire::Contribution& push, Requester& from);
  void progress(const wire::Envelope& push, std::size_t received_bytes);
  void complete(const wire::Contribution& push);
  /// Adds a contribution that is complete: it has no payload, or the payload is lent until `release`. If it is refused,
  /// it has been released.
  Status add(const wire::Contribution& push, Requester& from, std::span<const std::byte> payload,
             std::function<void()> release);

  /// Handle the other requests. `payload` need not outlive the call.
  Status describe_units(std::span<const std::byte> payload);
  Status set_rule(const wire::Header& header, std::span<const std::byte> payload);
  Status assign(const wire::Header& header, std::span<const std::byte> payload);
  /// Answers at once, or when the chunk has a value.
  Status pull(const wire::Header& header, Requester& from);
  /// Answers at once, with what the newest checkpoint has for the chunk.
  Status restore(const wire::Header& header, Requester& from);

  /// Forgets a requester that has left: what it contributed to unfinished chunks, and what it asked for.
  void drop(const Requester& from);

  /// Whether a step of the chunk has begun and not ended.
  bool has_open(const wire::Envelope& about) const {
    one_thread_.check();
    const auto found = entries_.find(key_of(about));
    return found != entries_.end() && found->second.state.started();
  }
  /// Whether a chunk has a value that a worker may ask for.
  bool has_values() const {
    one_thread_.check();
    return std::ranges::any_of(
        entries_, [](const auto& entry) { return entry.second.stored != nullptr && entry.second.stored->has_value(); });
  }
  /// Returns how many chunks have a step that has begun and not ended.
  std::size_t open_chunk_count() const {
    one_thread_.check();
    return static_cast<std::size_t>(
        std::ranges::count_if(entries_, [](const auto& entry) { return entry.second.state.started(); }));
  }
  /// Returns the open chunks that began before the given time.
  std::vector<OpenChunk> open_chunks(std::int64_t started_before_ns) const;
  /// Returns the ranks for which the chunk of a contribution waits. Empty if its step has ended.
  std::vector<std::uint32_t> awaited_ranks(const wire::Envelope& contribution) const;

 private:
  struct PendingPull {
    wire::Envelope about;
    wire::Pull asked;
    Requester* from = nullptr;
  };
  struct Entry final : PacedChunk {
    explicit Entry(Shard& its_shard);

    std::shared_ptr<const Buffer> value(const wire::Contribution& push) override;
    bool has_rule(const wire::Contribution& push) const override;
    std::size_t update_bytes(const wire::Contribution& shape) const override;
    Status update(const wire::Contribution& shape, Buffer gradient) override;
    void finish_if_all_here() override;

    Shard& shard;
    const std::shared_ptr<ChunkPace> pace;
    std::unique_ptr<StoredChunk> stored;  // null: nothing is kept between steps
    std::vector<PendingPull> pulls;
    std::size_t needed_bytes = 0;  // the least that a step of it needs, whatever has come too early
    bool computing = false;        // threads of the wide baseline work on it, or a product has begun
    Completion computed;           // when those threads are done
  };

  static void add_open(const Entry& entry, std::int64_t started_before_ns, std::vector<OpenChunk>& open);

  struct Rule {
    UpdateRule rule;
    std::uint64_t step = 0;                  // the first step for which the rule holds
    const Aggregator* aggregator = nullptr;  // of the rule; null: the sum
    Status refusal;                          // why this server cannot do what the rule says; no step ends with it
  };

  static std::uint64_t key_of(const wire::Envelope& about) { return std::uint64_t{about.unit} << 32 | about.chunk; }
  /// Returns the chunk, and creates it if it is unknown.
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
  /// `sum`: empty if no part is present.
  void finish(Entry& entry, Result<Buffer> sum);
  std::size_t update_bytes(const wire::Contribution& shape) const;
  /// Who gets an answer of a step that has ended, and what it contributed.
  struct StepAnswer {
    Requester* to;
    wire::Contribution push;
  };
  bool has_room_for_difference(const wire::Contribution& shape) const;
  void send(const std::vector<StepAnswer>& answers, wire::Header header,
            const Result<std::shared_ptr<const Buffer>>& payload, UpdateBase& base);
  Result<std::shared_ptr<const Buffer>> store(Entry& entry, Buffer sum, const wire::Contribution& shape,
                                              UpdateBase& base);
  Status keep(StoredChunk& stored, const wire::Assign& request, std::span<const std::byte> payload);
  void answer_pulls(Entry& entry);
  Status keep_rule(std::uint64_t key, Rule rule);
  const Rule* rule_of(const wire::Envelope& about) const;
  Result<const Aggregator*> aggregator_of(const UpdateRule& rule) const;
  std::uint64_t rule_key(std::uint32_t unit, std::uint32_t rank) const;

  const std::uint32_t worker_count_;
  Reduction reduction_;
  const ShardThreads threads_;
  const std::shared_ptr<BufferPool> pool_;
  std::size_t entry_bytes_;                                            // the memory of a chunk beside its data
  std::size_t needed_bytes_ = 0;                                       // the sum over all entries
  std::size_t largest_part_bytes_ = 0;                                 // of the parts that have been admitted
  const std::shared_ptr<const bool> turn_ = std::make_shared<bool>();  // held by those whose memory will become free
  std::unique_ptr<ShardPace> pace_;
  std::unordered_map<std::uint64_t, Entry> entries_;  // by unit << 32 | chunk
  std::unordered_map<std::uint64_t, Rule> rules_;     // by rule_key
  FeatureSet features_;                               // of the job and of this server's options
  bool collects_ = false;                             // some rule has had an aggregator other than the sum
  std::unique_ptr<ShardCheckpoint> checkpoint_;       // null: nothing is saved

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what comes back from other threads
  [[no_unique_address]] OneThread one_thread_{"Shard"};
};

}  // namespace poseidon
