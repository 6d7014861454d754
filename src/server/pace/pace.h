// Decides whom the steps of a shard's chunks wait for: every rank (consistency=bsp), all but late ranks
// (stragglers=drop), or nobody (consistency=ssp, async). It is chosen once for each shard
// (docs/decisions/0019-stragglers.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/pinned.h"
#include "poseidon/client.h"
#include "server/chunk/chunk_state.h"
#include "server/chunk/requester.h"
#include "transport/loop.h"
#include "wire/header.h"
#include "wire/pace.h"

namespace poseidon {

/// A chunk as its pace sees it.
class PacedChunk {
 public:
  PacedChunk(std::uint32_t worker_count, Reduction reduction, std::shared_ptr<BufferPool> pool)
      : state(worker_count, reduction, std::move(pool)) {}
  virtual ~PacedChunk() = default;

  /// The value that the server keeps, in the dtype of the push's result. Null if there is none.
  virtual std::shared_ptr<const Buffer> value(const wire::Contribution& push) = 0;
  /// Whether a push with this header updates the value by a rule that its sender has set.
  virtual bool has_rule(const wire::Contribution& push) const = 0;
  /// The most bytes that an update by a step of this shape needs beside its sum.
  virtual std::size_t update_bytes(const wire::Contribution& shape) const = 0;
  /// Updates the value with `gradient` and answers the pulls that wait for it.
  virtual Status update(const wire::Contribution& shape, Buffer gradient) = 0;
  /// Ends the open step if nothing is missing from it. It may destroy the chunk and its pace: call it last.
  virtual void finish_if_all_here() = 0;

  ChunkState state;  // the state of the open step
};

/// One chunk's pace. Every contribution to the chunk comes through it. Only the loop thread of its shard uses it
/// (Shard checks it).
class ChunkPace {
 public:
  virtual ~ChunkPace() = default;

  /// Admits a contribution whose header has arrived. ErrorCode::refused: it does not fit the open step or the pace.
  virtual Status admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) = 0;
  /// Returns where an admitted contribution's payload is received: in `buffer`. For `turn` see ChunkState::place.
  virtual std::span<std::byte> place(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
                                     std::shared_ptr<const void> turn) = 0;
  /// Notes that the first `received_bytes` of a placed payload have arrived.
  virtual void progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) = 0;
  /// Notes that all of a placed payload has arrived. May end the step, and with it the chunk.
  virtual void complete(PacedChunk& chunk, const wire::Contribution& push) = 0;
  /// Takes an admitted contribution that has arrived as a whole, lent until `release`. May end the step, and with it
  /// the chunk.
  virtual void add(PacedChunk& chunk, const wire::Contribution& push, Requester& from,
                   std::span<const std::byte> payload, std::function<void()> release) = 0;

  /// Notes that the open step ends with `payload`. `result` is the header of its answers. The chunk's state still has
  /// the parts.
  virtual void step_ended(PacedChunk& chunk, const wire::Header& result,
                          const Result<std::shared_ptr<const Buffer>>& payload) = 0;
  /// Notes that a requester has left. The chunk's state has forgotten it already.
  virtual void drop(PacedChunk& chunk, const Requester& from) = 0;
  /// Whether the pace keeps nothing of the chunk, so that the chunk may be forgotten.
  virtual bool idle() const = 0;
  /// Adds the pushes that have waited for their answers since before the given time.
  virtual void add_waiting(std::int64_t since_before_ns, std::vector<OpenChunk>& waiting) const = 0;
};

/// What a shard does differently under a pace.
struct PaceTraits {
  bool drops_late_ranks = false;     // a step may end without some ranks, which push it later
  bool applies_each_push = false;    // pushes to stored chunks are in no step's sum, and each rank has its own rule
  std::size_t bytes_of_a_chunk = 0;  // what the pace of one chunk costs
};

/// The pace of one shard: what its chunks' paces share. It must outlive them. Only the loop thread of the shard uses
/// it (Shard checks it).
class ShardPace : private Pinned {
 public:
  explicit ShardPace(PaceTraits its_traits) : traits(its_traits) {}
  virtual ~ShardPace() = default;

  /// Makes the pace of a new chunk, which must outlive it.
  virtual std::shared_ptr<ChunkPace> chunk_pace(PacedChunk& chunk) = 0;
  /// Ends the steps whose time is over at `time_ns` without the ranks that are missing.
  virtual void end_late_steps(std::int64_t /*time_ns*/) {}
  /// The ranks without which steps have ended.
  virtual std::vector<LateRank> late_ranks() const { return {}; }

  const PaceTraits traits;
};

/// What a shard gives its pace.
struct PaceSurroundings {
  std::uint32_t worker_count = 0;
  std::shared_ptr<BufferPool> pool;
  Loop* loop = nullptr;  // calls `end_late_steps` in time; if it is null, the caller does
  /// Told once of each rank that is late in more than one of ten steps. May be empty.
  std::function<void(std::uint32_t rank, const std::string& text)> on_notice;
};
std::unique_ptr<ShardPace> make_shard_pace(const wire::Pace& pace, PaceSurroundings surroundings);

}  // namespace poseidon
