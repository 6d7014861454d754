#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "poseidon/plan.h"

namespace poseidon {
namespace {

constexpr std::array kSchemeNames{
    std::pair<Scheme, std::string_view>{Scheme::automatic, "auto"},
#define POSEIDON_SCHEME(name) std::pair<Scheme, std::string_view>{Scheme::name, #name},
#include "poseidon/schemes.def"
#undef POSEIDON_SCHEME
};

/// Whether `auto` may choose this exact scheme, which may need factors.
bool may_choose(const SchemeTraits& traits, bool has_factors, const Cluster& cluster) {
  if (traits.one_way_at_a_time && cluster.placement == Placement::dedicated) return false;
  return traits.automatic && !traits.takes_rows && (has_factors || !traits.takes_factors);
}

/// Whether `auto` may choose this lossy scheme for the layer.
bool may_lose(const Layer& layer, Scheme scheme) {
  const auto& fits = traits_of(scheme).fits;
  return scheme == layer.compression.allowed && layer.dtype == DType::float32 && layer.wire == WireFormat::fp32 &&
         (fits == nullptr || fits(layer));
}

/// Returns the schemes that `auto` may choose for the layer.
std::vector<Scheme> open_schemes(const Layer& layer, bool has_factors, const Cluster& cluster) {
  std::vector<Scheme> schemes;
  for (const Scheme scheme : all_schemes())
    if (may_choose(traits_of(scheme), has_factors, cluster) || may_lose(layer, scheme)) schemes.push_back(scheme);
  return schemes;
}

/// Whether `auto` may choose this scheme for the layer, whose gradient has rows. An unknown `row_count` is 0.
bool may_take_rows(const Layer& layer, const SchemeTraits& traits, double row_count) {
  if (!traits.automatic || traits.takes_factors) return false;
  return traits.takes_rows ? !layer.zeros_are_missing || row_count > 0 : layer.zeros_are_missing;
}

std::vector<Scheme> open_row_schemes(const Layer& layer, double row_count) {
  std::vector<Scheme> schemes;
  for (const Scheme scheme : all_schemes())
    if (may_take_rows(layer, traits_of(scheme), row_count)) schemes.push_back(scheme);
  return schemes;
}

/// The bytes that a scheme sends for each value of its cost. Lossy schemes count in float32s.
double value_bytes(const Layer& layer, const SchemeTraits& traits) {
  if (traits.lossy) return dtype_bytes(DType::float32);
  const DType dtype =
      traits.takes_factors || traits.takes_rows ? factor_dtype_of(layer) : wire_dtype(layer.wire, layer.dtype);
  return bytes_per_value(dtype);
}

/// Returns the scheme that sends the fewest bytes.
Scheme cheapest_scheme(const std::vector<Scheme>& schemes, const Layer& layer, double factor_count,
                       const Cluster& cluster) {
  const auto cost_of = [&](Scheme scheme) {
    return layer_cost(layer, scheme, factor_count, cluster).busiest(cluster) * value_bytes(layer, traits_of(scheme));
  };
  Scheme best = Scheme::ps;
  double least = std::numeric_limits<double>::infinity();
  for (const Scheme scheme : schemes) {
    const double cost = cost_of(scheme);
    if (cost > least || (traits_of(scheme).lossy && cost == least)) continue;
    least = cost;
    best = scheme;
  }
  return best;
}

}  // namespace

std::string_view scheme_name(Scheme scheme) {
  for (const auto& [value, name] : kSchemeNames) {
    if (value == scheme) return name;
  }
  return "unknown";
}

Result<Scheme> parse_scheme(std::string_view name) {
  std::string known;
  for (const auto& [value, value_name] : kSchemeNames) {
    if (value_name == name) return value;
    known += known.empty() ? "" : ", ";
    known += value_name;
  }
  return Status(ErrorCode::invalid_argument, "unknown scheme \"" + std::string(name) + "\"; known: " + known);
}

double SchemeCost::busiest(const Cluster& cluster) const {
  return cluster.placement == Placement::colocated ? server_and_worker : std::max(worker, server);
}

bool keeps_rounding(const Layer& layer) {
  return layer.compression.error_feedback && layer.wire != WireFormat::fp32 && layer.dtype == DType::float32 &&
         (!layer.row_gradient || layer.zeros_are_missing);
}

std::size_t kept_count(const Layer& layer) {
  if (keeps_rounding(layer)) return layer.element_count;
  const Scheme lossy = layer.scheme == Scheme::automatic ? layer.compression.allowed : layer.scheme;
  if (lossy == Scheme::automatic || !traits_of(lossy).lossy) return 0;
  const auto& count = traits_of(lossy).kept_count;
  return count == nullptr ? layer.element_count : count(layer);
}

SchemeCost scheme_cost(Scheme scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const SchemeTraits& traits = traits_of(scheme);
  if (cluster.hosts.empty()) return traits.cost(rows, cols, factor_count, cluster);
  Cluster machines = cluster;
  machines.hosts.clear();
  machines.racks.clear();  // a machine's port carries as much with them as without: only uplinks carry less
  machines.worker_count = static_cast<int>(*std::ranges::max_element(cluster.hosts)) + 1;
  if (cluster.placement == Placement::colocated) machines.server_count = machines.worker_count;
  const double workers_of_each = static_cast<double>(cluster.worker_count) / machines.worker_count;
  if (traits.reduces_by_host) return traits.cost(rows, cols, factor_count, machines);
  // Each worker sends its own to the other machines, or all that it has to the servers.
  SchemeCost cost = traits.cost(rows, cols, factor_count, traits.uses_peers ? machines : cluster);
  cost.worker *= workers_of_each;
  cost.server_and_worker *= workers_of_each;
  if (!traits.uses_peers &&
      cluster.worker_count > 1)  // of the servers, those of the same machine are not reached over its port
    cost.server_and_worker *= (cluster.worker_count - workers_of_each) / (cluster.worker_count - 1.0);
  return cost;
}

SchemeCost layer_cost(const Layer& layer, Scheme scheme, double factor_count, const Cluster& cluster) {
  const SchemeTraits& traits = traits_of(scheme);
  const bool has_shape = layer.rows > 0 && layer.cols > 0;
  if (traits.lossy && layer.compression.rows > 0)
    return scheme_cost(scheme, layer.compression.rows, layer.element_count / layer.compression.rows,
                       traits.count_of == nullptr ? 0 : traits.count_of(layer), cluster);
  const double count = traits.count_of == nullptr ? factor_count : traits.count_of(layer);
  return scheme_cost(scheme, has_shape ? layer.rows : layer.element_count, has_shape ? layer.cols : 1, count, cluster);
}

bool chooses_exact(const Layer& layer, Scheme chosen) {
  return chosen == Scheme::ps && layer.scheme != Scheme::automatic && traits_of(layer.scheme).lossy;
}

std::vector<Scheme> automatic_schemes(const Layer& layer, const Cluster& cluster) {
  if (layer.scheme != Scheme::automatic || !layer.factorable() || layer.stored || !dtype_is_floating(layer.dtype) ||
      cluster.worker_count == 1)
    return {};
  return open_schemes(layer, true, cluster);
}

Scheme best_scheme(const Layer& layer, double factor_count, const Cluster& cluster, const SchemeChoice& choice) {
  const bool names_rows = layer.scheme != Scheme::automatic && traits_of(layer.scheme).takes_rows;
  const bool has_rows = layer.row_gradient && dtype_is_floating(layer.dtype);
  if (has_rows && names_rows) return layer.scheme;
  if (has_rows && layer.scheme == Scheme::automatic && !(layer.zeros_are_missing && cluster.worker_count == 1))
    return cheapest_scheme(open_row_schemes(layer, factor_count), layer, factor_count, cluster);
  if (cluster.worker_count == 1) return Scheme::local;
  if (names_rows) return Scheme::ps;
  const bool may_have_factors = layer.factorable() && dtype_is_floating(layer.dtype);
  if (chooses_exact(layer, choice.scheme)) return choice.scheme;
  if (layer.scheme != Scheme::automatic)
    return may_have_factors || !traits_of(layer.scheme).takes_factors ? layer.scheme : Scheme::ps;
  const bool has_factors = may_have_factors && factor_count > 0;
  if (has_factors && choice.holds_at(factor_count)) return choice.scheme;
  return cheapest_scheme(open_schemes(layer, has_factors, cluster), layer, factor_count, cluster);
}

}  // namespace poseidon
