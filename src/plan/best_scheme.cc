#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "plan/layer_rules.h"

namespace poseidon {
namespace {

constexpr std::array kSchemeNames{
    std::pair<Scheme, std::string_view>{Scheme::automatic, "auto"},
#define POSEIDON_SCHEME(name) std::pair<Scheme, std::string_view>{Scheme::name, #name},
#include "poseidon/schemes.def"
#undef POSEIDON_SCHEME
};

/// The bytes that a scheme sends for each value of its cost. Lossy schemes count in float32s.
double value_bytes(const Layer& layer, const SchemeTraits& traits) {
  if (traits.lossy) return dtype_bytes(DType::float32);
  const DType dtype =
      traits.takes_factors || traits.takes_rows ? factor_dtype_of(layer) : wire_dtype(layer.wire, layer.dtype);
  return bytes_per_value(dtype);
}

/// Returns the scheme that sends the fewest bytes.
Scheme cheapest_scheme(const SchemeSet& schemes, const Layer& layer, double factor_count, const Cluster& cluster) {
  const auto cost_of = [&](Scheme scheme) {
    return layer_cost(layer, scheme, factor_count, cluster).busiest(cluster) * value_bytes(layer, traits_of(scheme));
  };
  Scheme best = Scheme::ps;
  double least = std::numeric_limits<double>::infinity();
  for (const Scheme scheme : all_schemes()) {
    if (!schemes.contains(scheme)) continue;
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

Scheme best_scheme(const Layer& layer, double factor_count, const Cluster& cluster, const SchemeChoice& choice) {
  const SchemeSet schemes = schemes_at(layer, factor_count, cluster);
  const bool sends = !schemes.contains(Scheme::local);
  if (sends && chooses_exact(layer, choice.scheme)) return choice.scheme;
  if (layer.factorable() && factor_count > 0 && choice.holds_at(factor_count) && schemes.contains(choice.scheme))
    return choice.scheme;
  return cheapest_scheme(schemes, layer, factor_count, cluster);
}

}  // namespace poseidon
