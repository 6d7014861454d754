// Client: a worker's way into the exchange. One per process and job.
//
// Threads: every method may be called from any thread. `start*` never block: they hand the
// contribution to the client's loop and return. Only `connect`, `add_layers`, `wait*` and `shutdown`
// block, always with a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/options.h"
#include "poseidon/plan.h"
#include "poseidon/status.h"
#include "poseidon/store.h"
#include "poseidon/update.h"

namespace poseidon {

/// K rows of output gradients (left, K×M) and K rows of inputs (right, K×N), both row-major:
/// the gradient they stand for is leftᵀ·right (Poseidon §3.2).
struct FactorRows {
  const std::byte* left = nullptr;
  const std::byte* right = nullptr;
  std::size_t count = 0;  // K
};

/// One worker's gathered contribution to an sfb layer, for products made outside the core (CUDA).
/// Either `factors` or `dense`; neither when that worker had nothing.
struct GatheredPart {
  DType dtype = DType::float32;
  std::vector<FactorRows> factors;
  const std::byte* dense = nullptr;
};

/// Says that a dense gradient is not known to be a sum of few outer products.
inline constexpr std::uint64_t kNotFactorable = ~std::uint64_t{0};

/// What came of a layer's last exchange.
struct LayerStats {
  Scheme scheme = Scheme::automatic;  // the scheme that it took
  std::uint64_t step = 0;             // pushes of this layer so far
  bool present = false;               // some worker contributed to the result; the same on all ranks
  std::uint64_t factor_count = 0;     // K summed over the workers
  std::uint64_t bytes_sent = 0;       // by this worker over the network, headers included; not by its shard
  std::uint64_t bytes_received = 0;
  // With stragglers=drop: the chunks for which this rank came too late in this step, and the largest number of further
  // steps that had ended for one of them by then.
  std::size_t late_chunks = 0;
  std::uint32_t behind = 0;
  std::uint64_t update_count = 0;  // pull: updates that the server has made; the largest of any chunk
  // restore: the oldest and newest checkpoint version that the layer's chunks came from; 0: there was none.
  std::uint64_t oldest_version = 0;
  std::uint64_t newest_version = 0;
  std::int64_t started_ns = 0;  // by the monotonic clock
  std::int64_t completed_ns = 0;

  bool late() const { return late_chunks > 0; }
};

/// Bytes this process moved since connect, headers included, client and embedded shard together;
/// what stays inside the process does not count.
struct TrafficStats {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
};

/// How urgently the next forward pass needs a layer (Geryon §III-A).
struct LayerPriority {
  double urgency = 0;       // 1 − l/L of the l-th of L layers in the order in which forward uses them; 0 to 1
  int priority_class = -1;  // 0 is brought first; −1: as the threshold says
};

/// A rank that steps have been completed without (stragglers=drop). Layers of different `add_layers` count their steps
/// apart. Of another rank than its own a process knows what its server does: at least so many steps.
struct LateRank {
  std::uint32_t rank = 0;
  std::uint64_t late_steps = 0;   // in which at least one chunk was completed without it; others: the chunk's with most
  std::uint64_t late_chunks = 0;  // how often that was so of a chunk
  std::uint64_t last_step = 0;    // the last of these steps, by the layers' own count
};

/// The exchanges of one worker with all others. `connect` makes it; every method may be called from any thread.
class Client {
 public:
  /// Finds the other ranks through `store` (null: a TcpStore that rank 0 serves), starts the
  /// embedded shard where servers are colocated, connects all flows. Blocks up to the timeout.
  /// `keep_waiting` is asked now and then and may return false to give up (Ctrl-C): ErrorCode::aborted.
  ///
  /// With OnFailure::rejoin or shrink this forms the job's next generation, after a failure with those who have
  /// survived it: each destroys its client and calls again, with the same store (`open_store`) and `options.generation`
  /// as the client said. Others that are lost on the way begin another generation in the same call.
  /// ErrorCode::timeout names the slots that did not come; aborted, too, where another process has this one's place.
  static Result<std::unique_ptr<Client>> connect(const Options& options, std::shared_ptr<Store> store,
                                                 const std::function<bool()>& keep_waiting);
  virtual ~Client() = default;

  /// This client's membership. With OnFailure::shrink its numbers are of those who are there, by slot.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// 1, 2, …: which membership of the job it is. Higher than any that its members were part of before.
  virtual std::uint32_t generation() const = 0;
  /// Whether this process comes new to others that were in an earlier generation.
  virtual bool joining() const = 0;

  /// Adds the layers of one model, in the order in which backward finishes them. Every rank makes
  /// the same calls in the same order: the call waits for all ranks and fails with
  /// ErrorCode::mismatch, naming the ranks, where their plans differ. The returned plan's unit ids
  /// continue over calls; layer l of this call has the id `first_layer + l`.
  /// `transient`: servers keep no memory for these layers between steps (parameter broadcasts).
  struct Added {
    std::uint32_t first_layer = 0;
    Plan plan;
  };
  /// See above. Blocks up to the timeout.
  virtual Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                                   const std::function<bool()>& keep_waiting) = 0;

  /// Measures with which chunk size this cluster exchanges a tensor fastest (about a second) and uses it
  /// for the layers that are added from then on. `known`: a size that was measured before; rank 0's
  /// counts, 0 measures. Collective; the same answer on every rank.
  virtual Result<std::size_t> choose_chunk_bytes(std::size_t known, const std::function<bool()>& keep_waiting) = 0;

  /// Starts one layer's exchange: sends `data` (element_count elements), receives the sum over the
  /// workers divided by `divisor` into the same memory. The memory must stay valid and untouched
  /// until the exchange has completed. An integer layer needs divisor 1. `factor_count` is the K that
  /// this gradient would have as factors: it travels along, so that the next step's scheme follows it.
  virtual Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
                       std::uint64_t factor_count = kNotFactorable) = 0;

  /// `start` for many layers in one call: arrays[i] is layer first_layer + i's. Stops at the first that
  /// cannot start; those before it have.
  virtual Status start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                           std::uint32_t divisor) = 0;

  /// This rank has nothing for the layer (unused parameter, receiving side of a broadcast); the
  /// others' result lands in `destination`, which is untouched if nobody contributed.
  /// `counts`: a mean is over this rank, too; false for a step that it takes part in only to be with the others again
  /// (stragglers=drop).
  virtual Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor,
                              bool counts = true) = 0;

  // Layers with `stored`: the servers keep an array for each (Parameter Hub §3.1, Push, Pull, PushPull).
  // All are asynchronous like `start`; a layer has one operation under way at a time. The memory given
  // must stay valid until then, `data` unchanged, `destination` untouched.

  /// Contributes `data` and receives, when every rank has contributed, what the step makes of the
  /// layer: the sum divided by `divisor`, or with an update rule the updated parameters.
  virtual Status push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                           std::uint32_t divisor) = 0;
  /// Contributes only. Completes when the step has: every rank takes part in it by push or push_pull.
  virtual Status push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) = 0;
  /// Receives the layer's value as it is now, or waits for its first one. `array`: 0 the value, 1… the
  /// rule's state (1 momentum or exp_avg, 2 exp_avg_sq), kGradientArray the mean gradient of the last update where the
  /// rule keeps it; layer_stats tells the update count. While steps wait for all, the last update is that of the last
  /// step to which this rank has contributed, whatever the others do meanwhile.
  virtual Status pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array = 0) = 0;
  /// Sets the layer's value or a state array, by one rank; `update_count`: of updates that it has seen.
  /// Setting the value forgets the state. What this rank does afterwards comes after it; others wait
  /// for it where they pull before there is a value, and otherwise agree on when it happens.
  virtual Status assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array = 0,
                        std::uint64_t update_count = 0) = 0;
  /// The servers take the layer's value and state from their newest checkpoint, by one rank and before the layer's
  /// first push. Receives the value; layer_stats says of which version, and `destination` is untouched where there is
  /// none. Servers may answer with different versions: then ask for all layers again with the oldest as `version_limit`
  /// (0: no limit; kNoVersion: none may come, so that the job may begin anew where there are some), until all have the
  /// same. ErrorCode::refused where the checkpoint does not fit the layer.
  virtual Status restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit = 0) = 0;
  /// How the servers update the layer from the next push on. Every rank sets the same.
  virtual Status set_rule(std::uint32_t layer, const UpdateRule& rule) = 0;

  /// The same as `start` with factors instead of a dense gradient. `destination` receives the product of all
  /// workers' factors (added to what it holds if `accumulate`); empty: parts are only gathered and
  /// `gathered()` gives them. The factors' dtype may be narrower than the layer's.
  /// Only when `next_scheme(layer)` is sfb or adam (adam: no accumulate, no empty destination).
  virtual Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                               std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) = 0;

  /// The scheme the layer's next exchange takes: the same on every rank, decided from the factor
  /// counts that travelled with the layer's previous exchange. Call it between that exchange's
  /// completion and the next start.
  virtual Scheme next_scheme(std::uint32_t layer) const = 0;

  /// Tells the K summed over all workers before a layer's first exchange. Same value on every rank.
  virtual void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) = 0;

  /// The parts of a gather-only exchange, by rank; valid until the layer's next start. Empty after any other scheme
  /// than sfb.
  virtual std::vector<GatheredPart> gathered(std::uint32_t layer) const = 0;

  /// Waits until every started exchange has completed. `keep_waiting` is asked about every 100 ms
  /// and may return false to give up (Ctrl-C): the call then returns ErrorCode::aborted.
  virtual Status wait_all(const std::function<bool()>& keep_waiting) = 0;
  virtual Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) = 0;

  /// Whether no exchange of the layer is under way; so too after a failure, of which `wait` tells.
  virtual bool done(std::uint32_t layer) const = 0;

  /// What is sent first, from each layer's next start on: priorities[i] is layer first_layer + i's. In send queues
  /// the more urgent overtakes; of the flows between two peers the one of its class carries it: class 0 where the
  /// urgency is above `priority_threshold` (0 to 1), the last one elsewhere. Layers without priorities are equal,
  /// go last and in the last class. Results do not depend on any of it; every rank should set the same.
  virtual Status set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                                double priority_threshold) = 0;
  /// What the job goes on without, in words: marks that the system does not permit.
  virtual std::vector<std::string> notices() const = 0;

  // With stragglers=drop: a step of a chunk ends without the ranks that come late. A late rank's exchange completes
  // with the result that all others got, and what it has contributed is discarded; it goes through all steps, one by
  // one.

  /// How many further steps have been completed without this rank, as the answers to its last exchanges say; 0 when it
  /// was in time or has only one step missed; of the layer that is furthest behind. As long as it is more for a layer,
  /// `start_absent` counts for nothing for those added with it, so that a rank catches up with it. Cheap.
  virtual std::uint64_t behind() const = 0;
  /// Who has been late and how often, by rank: this rank, and those that the server of this process knows of. Ranks
  /// that have never been late are left out.
  virtual std::vector<LateRank> straggler_report() const = 0;

  /// How the layer's last completed exchange went, and what this process has sent and received. Cheap.
  virtual LayerStats layer_stats(std::uint32_t layer) const = 0;
  virtual TrafficStats traffic() const = 0;

  /// Ok as long as the job runs; then what ended it, here or elsewhere, first. Cheap, any thread.
  virtual Status status() const = 0;
  /// Tells every peer that this rank fails and why, so that they end at once with that reason. `planned`: nothing has
  /// failed, the members only form the job's next generation; they write no flight records then.
  virtual void abort(const std::string& reason, bool planned = false) = 0;
  /// Says goodbye and closes all flows. Idempotent; called by the destructor.
  virtual void shutdown() = 0;
};

}  // namespace poseidon
