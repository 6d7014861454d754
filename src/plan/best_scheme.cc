#include <array>
#include <utility>

#include "poseidon/plan.h"

namespace poseidon {
namespace {

constexpr std::array<std::pair<Scheme, std::string_view>, 5> kSchemeNames{{
    {Scheme::automatic, "auto"},
    {Scheme::ps, "ps"},
    {Scheme::sfb, "sfb"},
    {Scheme::adam, "adam"},
    {Scheme::local, "local"},
}};

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

Scheme best_scheme(const Layer& layer, double factor_count, const Cluster& cluster) {
  if (cluster.worker_count == 1) return Scheme::local;
  if (!layer.factorable() || !dtype_is_floating(layer.dtype)) return Scheme::ps;
  if (layer.scheme != Scheme::automatic) return layer.scheme;
  if (factor_count <= 0) return Scheme::ps;
  const Costs cost = costs(layer.rows, layer.cols, factor_count, cluster);
  return cost.sfb <= cost.ps ? Scheme::sfb : Scheme::ps;
}

}  // namespace poseidon
