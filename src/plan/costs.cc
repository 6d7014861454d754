#include <algorithm>

#include "poseidon/plan.h"

namespace poseidon {

Costs costs(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double workers = cluster.worker_count;
  const double servers = cluster.server_count;
  const double dense = static_cast<double>(rows) * static_cast<double>(cols);
  const double factors = factor_count * (static_cast<double>(rows) + static_cast<double>(cols));
  const bool colocated = cluster.placement == Placement::colocated;

  Costs result;
  result.ps_worker = 2 * dense;
  result.ps_server = 2 * workers * dense / servers;
  // A colocated shard serves its own worker from memory.
  result.ps_server_and_worker = 2 * dense * (workers + servers - 2) / servers;
  result.ps = colocated ? result.ps_server_and_worker : std::max(result.ps_worker, result.ps_server);

  result.sfb = 2 * (workers - 1) * factors;

  result.adam_server = workers * (dense + factors);
  result.adam_worker = dense + factors;
  result.adam = colocated ? (workers - 1) * (dense + factors) : result.adam_server;
  return result;
}

}  // namespace poseidon
