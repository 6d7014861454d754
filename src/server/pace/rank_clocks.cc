#include "server/pace/rank_clocks.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/invariant.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

RankClocks::RankClocks(std::uint32_t worker_count, std::optional<std::uint32_t> staleness)
    : staleness_(staleness), clocks_(worker_count, 0), slowest_{{0, worker_count}} {}

Status RankClocks::admit(const wire::Contribution& push) const {
  one_thread_.check();
  const std::uint64_t expected = clocks_[push.rank] + 1;
  const bool waits = std::ranges::any_of(waiting_, [&](const Waiting& one) { return one.push.rank == push.rank; });
  if (push.step == expected && !waits && !incoming.has(push.rank)) return {};
  return refused_push(push,
                      concat("the server expects step ", expected, waits ? ", after the answer to its last push" : ""));
}

void RankClocks::tick(const wire::Contribution& push, Requester& from) {
  one_thread_.check();
  const std::uint64_t before = std::exchange(clocks_[push.rank], push.step);
  const auto found = slowest_.find(before);
  invariant(push.step == before + 1 && found != slowest_.end(), "a rank's clock goes on step by step");
  if (--found->second == 0) slowest_.erase(found);
  ++slowest_[push.step];
  waiting_.push_back({push, &from, now_ns()});
}

bool RankClocks::may_go(std::uint64_t step) const {
  return !staleness_ || step <= slowest_.begin()->first + *staleness_;
}

std::vector<RankClocks::Waiting> RankClocks::release() {
  one_thread_.check();
  std::vector<Waiting> released;
  std::erase_if(waiting_, [&](const Waiting& one) {
    if (!may_go(one.push.step)) return false;
    released.push_back(one);
    return true;
  });
  return released;
}

std::vector<std::uint32_t> RankClocks::ranks_behind(std::uint64_t step) const {
  one_thread_.check();
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < clocks_.size(); ++rank)
    if (staleness_ && clocks_[rank] + *staleness_ < step) ranks.push_back(rank);
  return ranks;
}

void RankClocks::drop(const Requester* from) {
  one_thread_.check();
  std::erase_if(waiting_, [from](const Waiting& one) { return one.to == from; });
}

}  // namespace poseidon
