// project_adam: Project Adam's strategy, kept as a baseline. Factors go to the one shard that owns the matrix, which
// multiplies them and returns the dense gradient to all (Poseidon §3.2, Table 1). It is sharded_factors with one block.
#include "scheme/sharded_factors.h"

namespace poseidon {

namespace {

SchemeCost project_adam_cost(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double workers = cluster.worker_count;
  const double dense = static_cast<double>(rows) * static_cast<double>(cols);
  const double factors = factor_count * (static_cast<double>(rows) + static_cast<double>(cols));
  return {dense + factors, workers * (dense + factors), (workers - 1) * (dense + factors)};
}

double project_adam_multiply_adds(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  return cluster.worker_count * factor_count * static_cast<double>(rows) * static_cast<double>(cols);
}

}  // namespace

const SchemeProtocol& project_adam_scheme() {
  static const ShardedFactors scheme({
      .title = "Project Adam's strategy",
      .summary = "Project Adam's: factors to one shard, the dense matrix back (baseline).",
      .takes_factors = true,
      .needs_whole_layer = true,
      .uses_servers = true,
      .baseline = true,
      .cost = project_adam_cost,
      .multiply_adds = project_adam_multiply_adds,
  });
  return scheme;
}

}  // namespace poseidon
