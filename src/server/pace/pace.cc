#include "server/pace/pace.h"

#include "server/pace/bounded_staleness.h"
#include "server/pace/drop_late.h"
#include "server/pace/wait_for_all.h"

namespace poseidon {

std::unique_ptr<ShardPace> make_shard_pace(const wire::Pace& pace, PaceSurroundings surroundings) {
  if (pace.stragglers == Stragglers::drop) return std::make_unique<DroppingShard>(pace, std::move(surroundings));
  if (pace.consistency != Consistency::bsp) return std::make_unique<StaleShard>(pace, std::move(surroundings));
  return std::make_unique<WaitingShard>();
}

}  // namespace poseidon
