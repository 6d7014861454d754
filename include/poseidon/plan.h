// The plan: what every layer costs under every scheme, and which server core owns which chunk.
//
// These are pure functions. The same inputs give the same plan on every worker, so no rank has to tell another
// (Poseidon §3.2 and §4.1, "Coordinator", "information book").
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/options.h"
#include "poseidon/scheme.h"
#include "poseidon/status.h"

namespace poseidon {

/// On which machines the servers run.
enum class Placement : std::uint8_t {
  colocated,  // every worker hosts one shard
  dedicated,  // servers are machines of their own
};

/// P₁, P₂ and where the shards live.
struct Cluster {
  int worker_count = 1;
  int server_count = 1;
  Placement placement = Placement::colocated;
  std::vector<int> core_counts{};  // of each server; empty: one each
  int flow_count = 1;              // connections from a worker to each server core
  // By rank: the machine of the worker, from 0 in the order in which they come. Empty: each worker is for itself, also
  // if it shares a machine.
  std::vector<std::uint32_t> hosts{};
  // By rank: the rack of its machine, numbered likewise. Empty: machines do not add up by rack. Only with `hosts`.
  std::vector<std::uint32_t> racks{};

  /// How many cores a server has.
  int core_count(int server) const { return core_counts.empty() ? 1 : core_counts[static_cast<std::size_t>(server)]; }
};

/// How lossy schemes and wire formats compress a layer (docs/lossy.md, docs/wire-formats.md).
struct Compression {
  Scheme allowed = Scheme::automatic;  // the lossy scheme that `auto` may choose beside the exact ones; automatic: none
  double topk_fraction = 0.01;         // topk: the part of the elements that a worker sends, above 0 and at most 1
  std::size_t powersgd_rank = 4;       // powersgd: the rank of what a worker sends
  std::size_t rows = 0;  // powersgd: rows of the layer as a matrix, which divide its elements; 0: it is none
  std::optional<WireFormat> factor_wire{};  // how factors travel; nullopt: as dense gradients; never int8
  // A worker keeps what the wire format has rounded off a dense gradient, and adds it to the next one. Layers of a
  // group then travel as they are.
  bool error_feedback = false;
};

/// One tensor to synchronize, as the framework sees it.
struct Layer {
  std::string name;
  DType dtype = DType::float32;
  std::size_t element_count = 0;
  // M and N of the weight, if the layer's gradient is a sum of `factor_count` outer products, or if it has
  // `row_gradient`. Otherwise both are 0 (convolutions, biases, norms).
  std::size_t rows = 0;
  std::size_t cols = 0;
  Scheme scheme = Scheme::automatic;
  bool stored = false;  // servers keep its value (push, pull, updates); it takes scheme ps and is never in a group
  bool whole = false;   // it is one chunk on one server core (LAMB needs the norms of the whole layer)
  WireFormat wire = WireFormat::fp32;            // how the gradients of a float32 layer travel
  WireFormat parameter_wire = WireFormat::fp32;  // stored float32: how a rule's value comes back; fp32 or bf16
  bool float32_value = false;      // stored bfloat16: servers keep the value and the states of its rule in float32
  bool row_gradient = false;       // the gradient has few of the layer's rows, as an embedding's has
  bool zeros_are_missing = false;  // row_gradient: a row that no worker has is the same as one of zeros, so that `auto`
                                   // may choose a scheme without rows
  Compression compression{};

  /// Whether the gradient is a sum of outer products, and its size in bytes.
  bool factorable() const { return rows > 0 && cols > 0 && !row_gradient; }
  std::size_t size_bytes() const { return element_count * dtype_bytes(dtype); }
};

/// The type in which values of `dtype` travel. Only float32 is converted.
DType wire_dtype(WireFormat format, DType dtype);

/// The type in which a layer's factors, the results of sharded_factors and the values of rows travel. 8 bits are too
/// few for factors, because their errors multiply: they travel as bfloat16 then.
DType factor_dtype_of(const Layer& layer);

/// A scheme that was chosen for a layer because it was predicted to be faster (docs/choice.md).
struct SchemeChoice {
  Scheme scheme = Scheme::automatic;  // automatic: nothing was chosen
  double factor_count = 0;            // the mean K over the workers when it was chosen

  /// Whether the choice holds at this mean K: at least half of that at which it was made, and at most twice as much.
  bool holds_at(double mean_factor_count) const {
    return scheme != Scheme::automatic && mean_factor_count * 2 >= factor_count &&
           mean_factor_count <= factor_count * 2;
  }
};

/// The schemes among which `auto` chooses for the layer, in the order of schemes.def. Empty if the layer's scheme does
/// not depend on its factor count. A layer that is part of a group has no choice either, which this does not know.
std::vector<Scheme> automatic_schemes(const Layer& layer, const Cluster& cluster);

/// Whether `chosen` is the exact scheme that may be chosen for a layer that names a lossy one, whatever its factor
/// count.
bool chooses_exact(const Layer& layer, Scheme chosen);

/// Whether a worker keeps what is rounded off the layer's dense gradients (Compression::error_feedback).
bool keeps_rounding(const Layer& layer);

/// The number of float32s that a worker keeps from step to step of a layer that takes a lossy scheme, or may come to
/// take one. 0 for other layers.
std::size_t kept_count(const Layer& layer);

/// What a scheme costs for a matrix of this shape (SchemeTraits::cost). If workers of one machine add up among
/// themselves (Cluster::hosts), it is what the machine's port carries.
SchemeCost scheme_cost(Scheme scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster);

/// What a scheme costs for a layer. `factor_count` is the mean K over the workers.
SchemeCost layer_cost(const Layer& layer, Scheme scheme, double factor_count, const Cluster& cluster);

/// Algorithm 1, generalized to the cluster's placement. A layer with row gradients takes rows, unless it names another
/// scheme, or its missing rows are zeros: then it takes rows if they are known to be few enough. One worker takes
/// local. Otherwise a layer takes its own scheme, if it names one, unless the `choice` is an exact one
/// (chooses_exact()); the scheme of a `choice` that holds; or the cheapest of those that `auto` may choose and that
/// take it (automatic_schemes(), or ps and a lossy one). Of several that cost the same it takes the one that is
/// registered last: sfb before ps. `factor_count` is the mean K over the workers. If it is unknown or unbounded it is
/// 0, and no scheme with factors is chosen.
Scheme best_scheme(const Layer& layer, double factor_count, const Cluster& cluster, const SchemeChoice& choice = {});

/// A slice of a unit's bytes, as they are in memory, and the server core that owns it (Parameter Hub §3.2.4). Each
/// worker's messages about it travel on one flow.
struct Chunk {
  std::uint32_t index = 0;
  std::size_t offset_bytes = 0;
  std::size_t size_bytes = 0;
  int server = 0;
  int core = 0;  // of that server
  int flow = 0;  // of those from a worker to that core
};

/// A block of a layer's matrix, for schemes whose servers multiply factors: `row_count` rows and `col_count` columns.
/// Its messages have the index of a chunk of the unit, and go the way of that chunk.
struct Block {
  std::uint32_t chunk = 0;
  std::size_t row = 0;  // the first row, and the first column
  std::size_t col = 0;
  std::size_t row_count = 0;
  std::size_t col_count = 0;
};

/// What is exchanged as one: a single layer, or a group of small layers of one dtype. A group's buffer holds its
/// members one after the other, and then one element per member: the number of workers that contributed to it.
struct Unit {
  std::uint32_t id = 0;
  std::string name;  // the layer's name, or "group 3 (12 layers)"
  DType dtype = DType::float32;
  DType wire_dtype = DType::float32;    // of dense gradients in messages
  DType factor_dtype = DType::float32;  // of factors in messages, of what they add up to, and of the values of rows
  DType result_dtype = DType::float32;  // of what comes back from a step: the sum, or the stored value
  DType value_dtype = DType::float32;   // of what servers keep of a stored unit; otherwise `dtype`
  std::size_t size_bytes = 0;
  std::vector<std::uint32_t> layers;       // indexes into Plan::layers
  std::vector<std::size_t> offsets_bytes;  // of each member in the unit's buffer
  std::vector<Chunk> chunks;
  std::vector<Block> blocks;  // by chunk; of a layer whose gradient may be factors

  /// Whether it is a group of several layers.
  bool grouped() const { return layers.size() > 1; }
  /// Whether gradients are converted on their way.
  bool converts() const { return wire_dtype != dtype; }
  /// Whether factors are, and what they add up to.
  bool converts_factors() const { return factor_dtype != dtype; }
  /// Bytes that a slice of the unit of `slice_bytes` takes as another type.
  std::size_t bytes_as(DType other, std::size_t slice_bytes) const {
    return array_bytes(other, slice_bytes / dtype_bytes(dtype));
  }
};

/// Immutable once made; identical on every rank.
struct Plan {
  Cluster cluster;
  std::vector<Layer> layers;
  std::vector<Unit> units;
  std::vector<std::uint32_t> unit_of_layer;  // index into `units`
  std::vector<std::size_t> server_bytes;     // load of each shard
};

/// Makes the plan. `layers` are in the order in which backward finishes them. The first unit gets the id
/// `first_unit_id`. ErrorCode::invalid_argument for an empty name, two layers of the same name, or
/// rows·cols ≠ element_count.
Result<Plan> make_plan(std::vector<Layer> layers, const Cluster& cluster, const Options& options,
                       std::uint32_t first_unit_id);

/// The priority class of a layer (Geryon §III-C). An urgency up to the threshold gives the last class. Above it, the
/// classes from 0 to class_count − 2 share the urgencies from 1 down to the threshold in equal parts.
int priority_class(double urgency, double threshold, int class_count);

/// A description of the plan that is equal on two ranks if and only if their plans are equal. Line i describes unit i.
std::vector<std::string> plan_lines(const Plan& plan);

}  // namespace poseidon
