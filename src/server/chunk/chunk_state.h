// ChunkState: one chunk's contributions in the current step, and their running sum (Poseidon §4.1: the count that every
// KV pair keeps; Parameter Hub §3.2.2: tall aggregation).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/one_thread.h"
#include "kernel/kernel.h"
#include "poseidon/aggregate.h"
#include "poseidon/options.h"
#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// One worker's message with its payload. The payload is received into `buffer`, or a worker of this host lends it
/// until `release` is called.
struct Contribution {
  wire::Contribution push;
  Requester* from = nullptr;
  Buffer buffer;
  std::span<const std::byte> payload;
  std::function<void()> release;
  std::size_t received_bytes = 0;
  bool complete = false;
  std::shared_ptr<const void> turn;  // ChunkState::place

  bool present() const { return !push.absent; }
  bool has_factors() const { return push.has_factors(); }
};

/// How a shard adds.
struct Reduction {
  Aggregation aggregation = Aggregation::streaming;
  ReduceOrder order = ReduceOrder::rank;
};

/// Only the loop thread of its shard uses it. Steps of one chunk never overlap: no worker pushes step t + 1 before it
/// has the result of step t or has completed its push, and an early push is refused. Contributions to a step that has
/// ended without them go elsewhere (late_results.h).
///
/// The parts are added in one order, which `Reduction::order` fixes, and each range of bytes by itself: a part may be
/// added up to the point where its predecessor has been added. So adding keeps up with the network, a part's memory is
/// free when its last byte is added, and the bits do not depend on the timing.
class ChunkState {
 public:
  ChunkState(std::uint32_t worker_count, Reduction reduction, std::shared_ptr<BufferPool> pool);

  /// Admits a contribution whose header has arrived. ErrorCode::refused: it does not fit those that are already here
  /// (another kind, step, size, shape, dtype or divisor, or a second one from the same rank), or no shard can compute
  /// it (a divided integer).
  Status admit(const wire::Contribution& push, Requester* from);
  /// Says what reduces the open step, until `reset`; null: the sum. All parts stay here until the step ends if it is
  /// not null. Call it after each `admit` of a step that may have one: in rank order nothing is added before rank 0's
  /// part is admitted, so what is said then holds for the whole step.
  void set_aggregator(const Aggregator* aggregator) { one_thread_.checked(aggregator_) = aggregator; }
  const Aggregator* aggregator() const { return aggregator_; }
  /// Returns where an admitted contribution's payload is received: in `buffer`, which is from the pool. Once the parts
  /// before it have begun to arrive, its memory becomes free without any further message. `turn` is held from then on,
  /// as long as the memory is in use.
  std::span<std::byte> place(std::uint32_t rank, Buffer buffer, std::shared_ptr<const void> turn = nullptr);
  /// Notes that the first `received_bytes` of a rank's payload have arrived.
  void progress(std::uint32_t rank, std::size_t received_bytes);
  /// The bytes that the sum still needs beside the parts' own memory, if parts of this size are lent.
  std::size_t missing_sum_bytes(const wire::Contribution& push) const;
  /// Notes that a rank's whole payload has arrived: in its place, or lent as long as it is needed. In the latter case
  /// `release` is not empty.
  void complete(std::uint32_t rank, std::span<const std::byte> payload, std::function<void()> release);

  /// Whether all contributions have arrived.
  bool all_here() const { return complete_count_ == parts_.size(); }
  bool started() const { return admitted_count_ > 0; }
  /// When the first contribution of this step arrived.
  std::int64_t started_ns() const { return started_ns_; }
  const wire::Contribution& shape() const { return shape_; }
  /// Whether a rank's part may be added as it arrives, because the parts before it in the sum have begun to arrive. It
  /// is always true if the order is that of arrival.
  bool in_order(std::uint32_t rank) const;
  /// The ranks whose contribution has not completely arrived.
  std::vector<std::uint32_t> missing_ranks() const;
  bool any_present() const { return present_count_ > 0; }

  /// Whether the step may end without some ranks: its result is a mean over the ranks of dense floating-point parts,
  /// and outlives the step.
  bool is_mean() const;
  /// Ends the step without the contributions that are not complete (stragglers=drop, without streaming). From then on
  /// all_here() is true. Returns the contributions that have begun to arrive. The caller owns their memory now, and has
  /// to answer their senders.
  std::vector<Contribution> leave_out_missing();
  /// The ranks without which the step has ended.
  const std::vector<std::uint32_t>& left_out() const { return left_out_; }

  /// The contributions by rank. All are filled in when all_here().
  const std::vector<std::optional<Contribution>>& parts() const { return parts_; }

  /// Whether the sum is a product of factors, which takes long. factor_terms() has the terms. Only when all_here().
  bool is_product() const { return factors_count_ > 0; }
  /// The terms in order, in the parts' memory: factors, and dense parts among them.
  std::vector<kernel::FactorTerm> factor_terms();
  /// K summed over the parts. It saturates if a part has no factors. Only when all_here().
  std::uint32_t factor_count_sum() const;
  /// The number by which the sum of the parts is divided.
  unsigned divisor() const;

  /// The sum of the dense parts divided by the divisor, in the value's dtype. Only when all_here() and some are
  /// present. A mean is over the parts that count: parts that are excluded from the mean and parts that were left out
  /// do not.
  Buffer take_sum();
  /// The dense parts in order, for the wide baseline, which adds on other threads. Only when all_here().
  std::vector<const std::byte*> dense_inputs();

  /// Forgets the step's contributions and gives back their memory.
  void reset();
  /// Notes that a requester has left: its unfinished contribution will never be complete, and neither will the step.
  void drop(const Requester* from);
  /// The same for a complete step: its sum remains valid, and nobody waits for the requester's answer.
  void orphan(const Requester* from);

 private:
  Status fits(const wire::Contribution& push, std::size_t size_bytes) const;
  Contribution& admitted(std::uint32_t rank);
  Contribution* at(std::size_t position);
  void count_leading();
  std::size_t first_present();
  std::size_t available_bytes(const Contribution& part) const;
  bool streams() const { return reduction_.aggregation == Aggregation::streaming && aggregator_ == nullptr; }
  bool adds_on_arrival(const Contribution& part) const;
  void advance(std::size_t position);
  std::size_t group_end(std::size_t position, std::size_t end_bytes);
  void add(std::size_t first, std::size_t last, std::size_t end_bytes);
  void add_wide(std::span<const std::byte* const> inputs, std::size_t begin_bytes, std::size_t end_bytes, bool starts);
  void add_narrow(std::vector<const std::byte*> inputs, std::size_t begin_bytes, std::size_t end_bytes, bool starts,
                  bool ends);
  bool claim_sum(Contribution& base);
  void free(Contribution& part);

  const Reduction reduction_;
  const std::shared_ptr<BufferPool> pool_;
  std::vector<std::optional<Contribution>> parts_;  // by rank
  std::size_t admitted_count_ = 0;
  std::size_t complete_count_ = 0;
  std::size_t present_count_ = 0;
  std::size_t factors_count_ = 0;
  std::size_t leading_count_ = 0;        // so many ranks from 0 on are admitted
  std::size_t uncounted_count_ = 0;      // parts that are excluded from the mean, and parts that were left out
  std::vector<std::uint32_t> left_out_;  // ranks
  std::int64_t started_ns_ = 0;
  wire::Contribution shape_;                // of the first contribution; its dense size once it is known
  std::optional<std::size_t> dense_bytes_;  // of the parts that are present
  const Aggregator* aggregator_ = nullptr;  // null: the sum
  bool lost_ = false;                       // a part that is in the sum has lost its owner

  std::vector<std::uint32_t> order_;      // ranks in the order of adding, as far as it is known
  std::vector<std::size_t> position_of_;  // by rank
  std::vector<std::size_t> added_bytes_;  // by position: never more than its predecessor's
  std::size_t second_ = 0;                // the position that is added to the first part
  Buffer sum_;                            // empty until something is added to the first part
  bool wide_sum_ = false;                 // the sum has float32 values of 16-bit parts
  bool divided_ = false;                  // the part that was added last has divided the sum
  [[no_unique_address]] OneThread one_thread_{"ChunkState"};
};

/// A step of a chunk that is not complete, or a push that waits for its answer.
struct OpenChunk {
  wire::Envelope about;
  std::int64_t started_ns = 0;
  std::vector<std::uint32_t> missing_ranks;
  bool by_host = false;  // machines push it, and all ranks of a missing machine are missing
};

/// Bytes of the dense array that a push or factors message stands for; 0 when it does not say
/// (an absent push). ErrorCode::refused when the payload does not have the size its header says.
Result<std::size_t> dense_bytes(const wire::Contribution& push);
/// The same, refused too for a rank that the job has not and for an integer divided.
Result<std::size_t> contribution_bytes(const wire::Contribution& push, std::size_t worker_count);

}  // namespace poseidon
