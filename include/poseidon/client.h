// Client: the worker's interface to the exchange. There is one per process and job.
//
// Threads: every method may be called from any thread. `start*` never block: they hand the contribution to the
// client's loop and return. Only `connect`, `add_layers`, `choose_chunk_bytes`, `wait*` and `shutdown` block, always
// with a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "poseidon/collective.h"
#include "poseidon/dtype.h"
#include "poseidon/options.h"
#include "poseidon/plan.h"
#include "poseidon/status.h"
#include "poseidon/store.h"
#include "poseidon/traffic.h"
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
  DType dtype = DType::float32;  // of the factors, or of the dense gradient: the type in which it travelled
  std::vector<FactorRows> factors;
  const std::byte* dense = nullptr;
};

/// Rows of a layer, or of its gradient, in ascending order. If it is `dense`, it has all rows, and no indexes.
struct LayerRows {
  bool dense = false;
  std::span<const std::uint32_t> indexes{};
  std::span<const std::byte> values{};  // row after row
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
  std::int64_t compute_ns =
      0;  // of these, at the end: products or sums of the parts, and waiting for a thread for them

  /// Whether this rank came too late for at least one chunk of the step (stragglers=drop).
  bool late() const { return late_chunks > 0; }
};

/// How urgently the next forward pass needs a layer (Geryon §III-A).
struct LayerPriority {
  double urgency = 0;       // 0 to 1: 1 − l/L for the l-th of L layers in the order in which forward uses them
  int priority_class = -1;  // 0 is the most urgent class; −1: the threshold decides
};

/// A rank without which steps were completed (stragglers=drop). The layers of each `add_layers` call count their steps
/// separately.
struct LateRank {
  std::uint32_t rank = 0;
  // This rank: steps in which at least one chunk closed without it. Other ranks: the largest count over any one chunk
  // of the server in this process, which is a lower bound.
  std::uint64_t late_steps = 0;
  std::uint64_t late_chunks = 0;  // how often a chunk closed without it
  std::uint64_t last_step = 0;    // the last of these steps, as the layers count them
};

/// The exchanges of one worker with all others. `connect` makes it; every method may be called from any thread.
class Client {
 public:
  /// Joins the job. It finds the other ranks through `store` (null: a TcpStore that rank 0 serves), starts the embedded
  /// server unless servers are dedicated, and connects all flows. Blocks up to the timeout. `keep_waiting` is called
  /// from time to time; it may return false to give up (Ctrl-C), which gives ErrorCode::aborted.
  ///
  /// With OnFailure::rejoin or shrink this call forms the job's next generation. After a failure each survivor destroys
  /// its client and calls again, with the same store (`open_store`) and with `options.generation` set to the value that
  /// the client had. If more processes are lost meanwhile, the same call forms one more generation.
  /// ErrorCode::timeout names the slots that did not come. ErrorCode::aborted also means that another process has taken
  /// this one's slot.
  static Result<std::unique_ptr<Client>> connect(const Options& options, std::shared_ptr<Store> store,
                                                 const std::function<bool()>& keep_waiting);
  virtual ~Client() = default;

  /// This worker's number in this generation, and the number of workers. With OnFailure::shrink ranks count only the
  /// workers that are present, in the order of their slots.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// The workers and servers of this generation, and which workers add up their gradients among themselves. Before the
  /// first layers are added, the servers' cores are not known.
  virtual Cluster cluster() const = 0;
  /// The number of this membership of the job: 1, 2, …. It is higher than that of any membership of which a member was
  /// part before.
  virtual std::uint32_t generation() const = 0;
  /// A text that the members of this generation share, and nobody else has, whatever their jobs are called.
  virtual std::string run() const = 0;
  /// Whether this process is new, while others were in an earlier generation.
  virtual bool joining() const = 0;
  /// Whether a server that this rank knows has a checkpoint_dir. With dedicated servers their options say so, not this
  /// rank's.
  virtual bool servers_save() const = 0;

  /// Adds the layers of one model, in the order in which backward finishes them. Collective: every rank makes the same
  /// calls in the same order. Blocks until all ranks have called. ErrorCode::mismatch names the ranks whose plans
  /// differ. Unit ids continue over calls; layer l of this call has the id `first_layer + l`.
  /// `transient`: servers keep no memory for these layers between steps (parameter broadcasts).
  struct Added {
    std::uint32_t first_layer = 0;
    Plan plan;
  };
  /// See above. Blocks up to the timeout.
  virtual Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                                   const std::function<bool()>& keep_waiting) = 0;

  /// Measures which chunk size exchanges a tensor fastest in this cluster (about a second), and uses it for layers that
  /// are added later. `known`: a size that was measured before, or 0 to measure; rank 0's value counts. Returns the
  /// size in bytes, the same on every rank. Collective.
  virtual Result<std::size_t> choose_chunk_bytes(std::size_t known, const std::function<bool()>& keep_waiting) = 0;

  /// Starts one layer's exchange: sends `data` (element_count elements) and receives the sum over the workers, divided
  /// by `divisor`, into the same memory. The memory must stay valid and untouched until the exchange has completed. An
  /// integer layer needs divisor 1. `factor_count` is the K that this gradient would have as factors. It decides,
  /// together with the other ranks' counts, the scheme of the next step.
  virtual Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
                       std::uint64_t factor_count = kNotFactorable) = 0;

  /// `start` for many layers in one call: arrays[i] belongs to layer first_layer + i. Stops at the first layer that
  /// cannot start; the layers before it have started.
  virtual Status start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                           std::uint32_t divisor) = 0;

  /// Takes part in a step without a contribution (an unused parameter, the receiving side of a broadcast). The others'
  /// result is written to `destination`, which stays untouched if nobody contributed. `counts`: whether a mean is over
  /// this rank, too. It is false for a step in which this rank only catches up (stragglers=drop).
  virtual Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor,
                              bool counts = true) = 0;

  // Operations on layers with `stored`: the servers keep an array for each (Parameter Hub §3.1, Push, Pull, PushPull).
  // All are asynchronous like `start`. A layer has one operation under way at a time. Until it completes, the memory
  // must stay valid, `data` unchanged and `destination` untouched.

  /// Contributes `data`. When every rank has contributed, receives the layer's new value: the sum divided by `divisor`
  /// or, with an update rule, the updated parameters.
  virtual Status push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                           std::uint32_t divisor) = 0;
  /// Contributes only. Completes when the step does. Every rank takes part in the step with push or push_pull.
  virtual Status push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) = 0;
  /// Receives the layer's value as it is now, or waits for its first value. `array`: 0 is the value, 1 and 2 are the
  /// rule's state (1 momentum or exp_avg, 2 exp_avg_sq). kGradientArray is the mean gradient of the last update, if the
  /// rule keeps it. layer_stats gives the update count. While steps wait for all ranks, the last update is that of the
  /// last step to which this rank has contributed, whatever the others do meanwhile. A value that a rule has made in a
  /// step of this rank comes as steps bring it (Layer::parameter_wire), or, `exact`, as the servers keep it.
  virtual Status pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array = 0,
                      bool exact = false) = 0;
  /// Sets the layer's value or a state array. One rank calls it. `update_count` is the number of updates that the value
  /// has seen. Setting the value discards the state. Later operations of this rank come after it. A pull of another
  /// rank waits for it if there is no value yet. Otherwise the ranks must agree on when it happens.
  virtual Status assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array = 0,
                        std::uint64_t update_count = 0) = 0;
  /// Makes the servers take the layer's value and state from their newest checkpoint. One rank calls it, before the
  /// layer's first push. Receives the value; layer_stats gives its version. Without a checkpoint `destination` stays
  /// untouched. Servers may answer with different versions: then call it again for all layers with the oldest version
  /// as `version_limit`, until all are the same. With version_limit 0 there is no limit. With kNoVersion no version is
  /// taken, so that a job may begin anew although there are versions.
  /// ErrorCode::refused: the checkpoint does not fit the layer.
  virtual Status restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit = 0) = 0;
  /// Sets how the servers update the layer from the next push on. Every rank sets the same rule. If they do not, the
  /// step ends with ErrorCode::mismatch, except with consistency ssp and async. A rule of another kind than that of the
  /// last update begins with states of zeros and an update count of 0.
  /// `compared`: the servers compare the ranks' rules. Leave it out where the caller compares them and says more.
  virtual Status set_rule(std::uint32_t layer, const UpdateRule& rule, bool compared = true) = 0;

  /// The same as `start`, with factors instead of a dense gradient. `destination` receives the product of all workers'
  /// factors; with `accumulate` the product is added to what `destination` holds. If `destination` is empty, the parts
  /// are only gathered, and `gathered()` returns them. The factors' dtype may be narrower than the layer's.
  /// Only when `next_scheme(layer)` takes factors (SchemeTraits). If the workers do not multiply them themselves,
  /// neither `accumulate` nor an empty `destination` is allowed, and no other dtype than the layer's, unless the scheme
  /// converts and the layer is of float32.
  virtual Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                               std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) = 0;

  /// The same as `start`, with some rows of the gradient instead of all. The indexes are below the layer's `rows`, in
  /// ascending order, each once. Rows that a worker does not give are zeros. If `destination` is empty, `result_rows`
  /// returns the result. Otherwise it is written there, with zeros for the rows that nobody gave. A worker may also
  /// call `start`, or `start_absent` with an empty `destination`. Only when `next_scheme(layer)` takes rows
  /// (SchemeTraits).
  virtual Status start_rows(std::uint32_t layer, const LayerRows& rows, std::span<std::byte> destination,
                            std::uint32_t divisor) = 0;

  /// The result of the layer's last exchange, if it was started with an empty `destination`: the rows that some worker
  /// gave, or all rows if some worker gave a dense gradient. Valid until the layer's next start. It is empty if nobody
  /// contributed.
  virtual LayerRows result_rows(std::uint32_t layer) const = 0;

  /// The residual of a layer: what this rank has not sent yet, because it takes a lossy scheme (docs/lossy.md). It has
  /// a float32 for each element; with powersgd the right vectors follow. It is valid until the layer's next start.
  /// Empty if there is none, as after an exchange that has failed if the scheme keeps_after_result (SchemeTraits). Call
  /// it while no exchange of the layer is under way.
  virtual std::span<const std::byte> residual(std::uint32_t layer) const = 0;

  /// Sets the residual, which is then a part of this rank's next gradient that takes a lossy scheme. An empty one
  /// removes it. ErrorCode::invalid_argument: it has not the size of the layer, the layer is in a group or not of
  /// float32, or an exchange of it is under way.
  virtual Status set_residual(std::uint32_t layer, std::span<const std::byte> residual) = 0;

  /// The scheme of the layer's next exchange. It is the same on every rank, because the factor counts in the messages
  /// of the previous exchange decide it. Call this between the completion of that exchange and the next start.
  virtual Scheme next_scheme(std::uint32_t layer) const = 0;

  /// Sets K, summed over all workers, before a layer's first exchange. Every rank sets the same value.
  virtual void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) = 0;

  /// Sets the scheme that a layer with Scheme::automatic takes from its next start on, instead of the cheapest one,
  /// while the choice holds (SchemeChoice). For a layer that names a lossy scheme ps may be chosen, and holds for every
  /// K; its residual waits. Scheme::automatic withdraws the last choice. Every rank makes the same
  /// choice between the same two exchanges of the layer. If ranks choose differently, the job ends with
  /// ErrorCode::mismatch at the layer's next exchange. ErrorCode::invalid_argument if the layer cannot take the scheme
  /// (automatic_schemes(), chooses_exact(); a layer of a group has no choice), or if an exchange of it is under way.
  virtual Status choose(std::uint32_t layer, const SchemeChoice& choice) = 0;

  /// The parts of a gather-only exchange, by rank; valid until the layer's next start. Empty after any other scheme
  /// than sfb.
  virtual std::vector<GatheredPart> gathered(std::uint32_t layer) const = 0;

  /// Waits until no exchange is under way, or until that of one layer has completed. One that another thread starts on
  /// the layer meanwhile is not waited for. `keep_waiting` is called about every 100 ms; if it returns false (Ctrl-C),
  /// the call returns ErrorCode::aborted.
  virtual Status wait_all(const std::function<bool()>& keep_waiting) = 0;
  virtual Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) = 0;

  /// The number of the layer's newest operation; 0 if there was none. Whoever has started one reads its number before
  /// another thread may start the next.
  virtual std::uint64_t newest_operation(std::uint32_t layer) const = 0;
  /// Waits until the layer's operation of this number has ended, whatever has started since. Returns ok if it has
  /// completed, also where the job has failed later, and otherwise the failure that has ended it. So a second call
  /// returns at once, and the same.
  virtual Status wait_operation(std::uint32_t layer, std::uint64_t number,
                                const std::function<bool()>& keep_waiting) = 0;

  /// From now on this thread's calls count as those of another thread that uses the client and waits for this one, as
  /// autograd's threads work for the one that has called backward(). `thread` is that thread's pthread_t, or 0: as its
  /// own again. It matters for finding members that wait for each other (docs/decisions/0059-standstill.md).
  virtual void act_for(std::uint64_t thread) = 0;

  /// From now on threads that have not used the client yet may use it at any time, so nobody can tell that members wait
  /// for each other: such a job ends by its timeout.
  virtual void expect_other_threads() = 0;

  /// Whether no exchange of the layer is under way. It is also true after a failure; `wait` then returns the failure.
  virtual bool done(std::uint32_t layer) const = 0;
  /// Whether `wait_operation` would return at once.
  virtual bool operation_done(std::uint32_t layer, std::uint64_t number) const = 0;

  /// Sets what is sent first, from each layer's next start on. priorities[i] belongs to layer first_layer + i. More
  /// urgent layers overtake in send queues. The flow of a layer's class carries it: class 0 if its urgency is above
  /// `priority_threshold` (0 to 1), otherwise the last class. Layers without priorities go last, in the last class, and
  /// are equal to each other. Results do not depend on priorities. Every rank should set the same.
  virtual Status set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                                double priority_threshold) = 0;
  /// Messages about what does not work although the job goes on, such as marks that the system does not permit.
  virtual std::vector<std::string> notices() const = 0;

  // With stragglers=drop a step of a chunk ends without the ranks that come late. A late rank's exchange completes with
  // the result that all others got, and its contribution is discarded. It goes through all steps, one by one.

  /// How many further steps were completed without this rank, as the answers to its last exchanges say, for the layer
  /// that is furthest behind. 0: this rank was in time, or it has missed only one step. As long as it is above 0 for a
  /// layer, `start_absent` of the layers that were added with it does not count, so that the rank can catch up. Cheap.
  virtual std::uint64_t behind() const = 0;
  /// The ranks that have been late, in order: this rank, and those that the server of this process knows. Ranks that
  /// have never been late are left out.
  virtual std::vector<LateRank> straggler_report() const = 0;

  /// How the layer's last completed exchange went, and what this process has sent and received. Cheap.
  virtual LayerStats layer_stats(std::uint32_t layer) const = 0;
  /// Keeps how every layer's pushes from number `first` to `first + count - 1` go, which are LayerStats::step. What was
  /// kept before is forgotten. For those who look at steps later than they end. Any thread.
  virtual void record_pushes(std::uint64_t first, std::uint32_t count) = 0;
  /// What is kept of a layer's pushes that have completed, in their order. Any thread.
  virtual std::vector<LayerStats> recorded_pushes(std::uint32_t layer) const = 0;
  virtual TrafficStats traffic() const = 0;

  // Collectives (poseidon/collective.h). They start like exchanges, and each has a number. A communicator is known by
  // an id that its ranks have agreed on, and that no other one of this client has.

  /// Makes a communicator of these ranks of the client, of which this rank is one. Its ranks count from 0 in this
  /// order. Not collective: messages of others may come before. ErrorCode::invalid_argument: no such set of ranks, or
  /// the id is taken.
  virtual Status add_communicator(std::uint32_t id, std::vector<std::uint32_t> ranks) = 0;
  /// Starts a call. ErrorCode::invalid_argument: its arrays do not fit its kind. Ranks whose calls differ end the job
  /// with ErrorCode::mismatch, which names the call here and the rank whose call is another one.
  virtual Result<std::uint64_t> start_collective(std::uint32_t communicator, CollectiveCall call) = 0;
  /// Sends to a rank of the communicator, which takes it with receive() and the same tag. Messages with one tag are
  /// taken in the order in which they were sent.
  virtual Result<std::uint64_t> send(std::uint32_t communicator, std::uint32_t to, MessageKind kind,
                                     std::span<const std::byte> data) = 0;
  /// Receives from a rank, or kAnySource, exactly as many bytes as are sent.
  virtual Result<std::uint64_t> receive(std::uint32_t communicator, std::uint32_t from, MessageKind kind,
                                        std::span<std::byte> memory) = 0;
  /// Waits until the call has completed. Returns the sender's rank, for receive(). After `limit` it returns
  /// ErrorCode::timeout, and the call goes on; 0: there is no limit but the job's timeout.
  virtual Result<std::uint32_t> wait_collective(std::uint64_t call, std::chrono::milliseconds limit,
                                                const std::function<bool()>& keep_waiting) = 0;
  /// Whether the call has completed, with or without a failure.
  virtual bool collective_done(std::uint64_t call) const = 0;

  /// Ok as long as the job runs. Afterwards it is the first failure that ended the job, here or on another rank. Cheap,
  /// any thread.
  virtual Status status() const = 0;
  /// Tells every peer that this rank fails and why, so that they end at once with that reason. `planned`: nothing has
  /// failed, and the members only form the job's next generation. They then write no flight records.
  virtual void abort(const std::string& reason, bool planned = false) = 0;
  /// Leaves the job in order. Nothing may start any more. The call waits until every rank has contributed to the
  /// exchanges to which this rank has, because late ranks still need this rank and its server for them. It waits no
  /// longer if the job fails, if another rank has left without contributing, or if nothing has moved for `timeout`;
  /// what ends the job then is no failure of this rank any more. Then it says goodbye to all and closes all flows.
  /// `keep_waiting` as above; if it returns false, the rank leaves at once. Further calls have no effect. After a
  /// failure, and in the destructor, nothing is waited for.
  ///
  /// With `serves_on` the server in this process goes on after the goodbye for as long as it has values that the others
  /// may ask for: until they have left, too, or are lost.
  virtual void shutdown(const std::function<bool()>& keep_waiting, bool serves_on) = 0;
  void shutdown(const std::function<bool()>& keep_waiting) { shutdown(keep_waiting, false); }
  void shutdown() {
    shutdown([] { return true; });
  }
};

}  // namespace poseidon
