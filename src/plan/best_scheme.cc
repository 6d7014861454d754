#include <algorithm>
#include <array>
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

bool may_choose(const SchemeTraits& traits, const Cluster& cluster) {
  if (traits.one_way_at_a_time && cluster.placement == Placement::dedicated) return false;
  return traits.automatic && !traits.takes_rows;
}

/// Returns the cheapest of these schemes.
Scheme cheapest_scheme(const std::vector<Scheme>& schemes, const Layer& layer, double factor_count,
                       const Cluster& cluster) {
  Scheme best = Scheme::ps;
  double least = traits_of(best).cost(layer.rows, layer.cols, factor_count, cluster).busiest(cluster);
  for (const Scheme scheme : schemes) {
    const double cost = traits_of(scheme).cost(layer.rows, layer.cols, factor_count, cluster).busiest(cluster);
    if (cost > least) continue;
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

std::vector<Scheme> automatic_schemes(const Layer& layer, const Cluster& cluster) {
  std::vector<Scheme> schemes;
  if (layer.scheme != Scheme::automatic || !layer.factorable() || layer.stored || !dtype_is_floating(layer.dtype) ||
      cluster.worker_count == 1)
    return schemes;
  for (const Scheme scheme : all_schemes())
    if (may_choose(traits_of(scheme), cluster)) schemes.push_back(scheme);
  return schemes;
}

Scheme best_scheme(const Layer& layer, double factor_count, const Cluster& cluster, const SchemeChoice& choice) {
  const bool names_rows = layer.scheme != Scheme::automatic && traits_of(layer.scheme).takes_rows;
  const bool has_rows = layer.row_gradient && dtype_is_floating(layer.dtype);
  if (has_rows && (names_rows || layer.scheme == Scheme::automatic)) return Scheme::rows;
  if (cluster.worker_count == 1) return Scheme::local;
  if (names_rows) return Scheme::ps;
  if (!layer.factorable() || !dtype_is_floating(layer.dtype)) {
    const bool takes_any = layer.scheme != Scheme::automatic && !traits_of(layer.scheme).takes_factors;
    return takes_any ? layer.scheme : Scheme::ps;
  }
  if (layer.scheme != Scheme::automatic) return layer.scheme;
  if (factor_count <= 0) return Scheme::ps;
  if (choice.holds_at(factor_count)) return choice.scheme;
  return cheapest_scheme(automatic_schemes(layer, cluster), layer, factor_count, cluster);
}

}  // namespace poseidon
