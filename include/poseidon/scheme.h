// Schemes: the ways in which the sum of one layer's gradient reaches every worker. The sum is exact unless the scheme
// is lossy.
//
// A scheme says itself what it accepts, whom it talks to and what it costs; everybody else asks its traits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "poseidon/status.h"

namespace poseidon {

struct Cluster;
struct Layer;

/// A scheme by its name in schemes.def, or `automatic`: the cheapest, chosen anew for every step.
enum class Scheme : std::uint8_t {
  automatic,  // written "auto"
#define POSEIDON_SCHEME(name) name,
#include "poseidon/schemes.def"  // IWYU pragma: keep
#undef POSEIDON_SCHEME
};

/// What one node sends plus receives per step for an M×N layer, in numbers (not bytes; Poseidon Table 1).
struct SchemeCost {
  double worker = 0;             // of a machine that only hosts a worker
  double server = 0;             // of a machine that only hosts a server
  double server_and_worker = 0;  // of a machine that hosts both

  /// The cost of the busiest node under the cluster's placement.
  double busiest(const Cluster& cluster) const;
};

/// What a scheme accepts, whom it talks to and what it costs.
struct SchemeTraits {
  std::string_view title;    // a few words, for charts
  std::string_view summary;  // one sentence, for help texts

  // What it accepts.
  bool takes_factors = false;      // gradients may come as factors; the layer must be factorable then
  bool workers_multiply = false;   // each worker gets all factors: they may be narrower than the layer, their product
                                   // may be added to the destination, or be left to the caller
  bool takes_rows = false;         // only for layers with row gradients, which come as rows of the layer
  bool needs_whole_layer = false;  // a layer lies in one piece on one server core
  bool converts = false;           // numbers may travel in another format than they have (Layer::wire)
  bool only_one_worker = false;    // for a cluster of one worker, where it is chosen without being asked for
  bool lossy = false;              // the sum lacks what each worker keeps for its next gradient; for float32 gradients
                                   // that are dense

  // Whom it talks to.
  bool uses_servers = false;  // workers await results from the servers
  bool uses_peers = false;    // workers await each other's parts, which may come before a worker has started the step
  bool reduces_by_host = false;  // workers of one machine add up their dense gradients first (Cluster::hosts)
  bool can_drop_late = false;    // a step can end without late workers (stragglers=drop)

  // What it is compared with.
  bool automatic = false;  // `auto` may choose it
  /// With dedicated servers a worker sends all it has before a result comes back. So its port is busy in one direction
  /// at a time, and `cost`, which counts both, is too low there: `auto` chooses it only if the servers are colocated.
  bool one_way_at_a_time = false;
  bool baseline = false;  // only there for comparison with the papers
  /// The cost of a layer of `rows` × `cols` in a cluster. `factor_count` is K: batch rows × positions × accumulation
  /// steps on one worker; of a lossy scheme, what `count_of` returns. `layer_cost` (plan.h) calls it for a layer.
  SchemeCost (*cost)(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) = nullptr;
  /// The multiply-adds of the busiest process from the arrival of the last part to the result, for the same arguments.
  /// Null: there are none. Sums that are made while parts arrive do not count.
  double (*multiply_adds)(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) = nullptr;
  bool keeps_after_result = false;  // lossy: what is kept of a step is known with its result, so that an exchange that
                                    // fails leaves nothing
  // Of lossy schemes, each of which may be null:
  double (*count_of)(const Layer& layer) = nullptr;         // on what the cost depends besides the shape
  bool (*fits)(const Layer& layer) = nullptr;               // whether the layer is worth being compressed
  std::size_t (*kept_count)(const Layer& layer) = nullptr;  // the float32s that a worker keeps; null: its elements
};

/// All schemes, in the order of schemes.def.
std::span<const Scheme> all_schemes();
/// What a scheme says of itself; not for Scheme::automatic.
const SchemeTraits& traits_of(Scheme scheme);

/// The name that options and messages use, such as "ps".
std::string_view scheme_name(Scheme scheme);
/// The scheme of that name. ErrorCode::invalid_argument for an unknown one.
Result<Scheme> parse_scheme(std::string_view name);

}  // namespace poseidon
