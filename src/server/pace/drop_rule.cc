#include "poseidon/drop_rule.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "server/pace/arrivals.h"

namespace poseidon {

struct DropRule::State {
  State(std::uint32_t worker_count, double deviations) : arrivals(worker_count), factor(deviations) {}
  Arrivals arrivals;
  ArrivalSpread spread;
  const double factor;
  std::uint64_t step = 0;
};

DropRule::DropRule(std::uint32_t worker_count, double factor) : state_(std::make_unique<State>(worker_count, factor)) {}
DropRule::~DropRule() = default;

std::int64_t DropRule::end_step(std::span<const std::int64_t> arrivals_ns, std::int64_t waits_until_ns) {
  std::vector<std::uint32_t> order(arrivals_ns.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::uint32_t rank) { return arrivals_ns[rank]; });
  const std::int64_t all_ns = arrivals_ns[order.back()];
  std::int64_t end_ns = all_ns;
  ++state_->step;
  for (const std::uint32_t rank : order) {
    if (arrivals_ns[rank] > end_ns) break;
    if (!state_->arrivals.add(rank, arrivals_ns[rank])) continue;
    if (const auto deadline = state_->spread.deadline_ns(state_->step, arrivals_ns[rank], state_->factor))
      end_ns = std::min(all_ns, std::max(waits_until_ns, *deadline));
  }
  state_->spread.add(state_->arrivals.deviation_ns());
  state_->arrivals.reset();
  return end_ns;
}

}  // namespace poseidon
