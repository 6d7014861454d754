// The plan: what every layer costs under every scheme, and which server core owns which chunk.
//
// These are pure functions. The same inputs give the same plan on every worker, so no rank has to tell another
// (Poseidon §3.2 and §4.1, "Coordinator", "information book").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/layer.h"
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

/// The bytes before the payload of every message (docs/wire-format.md).
inline constexpr std::size_t kMessageHeaderBytes = 64;

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
  std::vector<Layer> layers;      // as they are settled
  std::vector<LayerTerms> terms;  // of each layer
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
