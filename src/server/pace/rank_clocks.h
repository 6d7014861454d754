// RankClocks: how far each rank is with one chunk whose pushes are applied one by one (consistency=ssp, async).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "server/pace/parts_in_flight.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// A rank's clock is the last step that it has pushed. Loop thread of its shard only.
class RankClocks {
 public:
  /// A push that has not been answered.
  struct Waiting {
    wire::Contribution push;
    Requester* to = nullptr;
    std::int64_t since_ns = 0;
  };

  /// `staleness`: how many steps a rank's push may be ahead of the slowest rank to be answered; empty: no bound.
  RankClocks(std::uint32_t worker_count, std::optional<std::uint32_t> staleness);

  /// Refuses a push that is not the rank's next step, and one before the answer to the rank's last one.
  Status admit(const wire::Contribution& push) const;
  /// An admitted push has been applied; it waits for its answer.
  void tick(const wire::Contribution& push, Requester& from);
  /// Those that are to be answered now, in the order in which they came.
  std::vector<Waiting> release();
  const std::vector<Waiting>& waiting() const { return waiting_; }
  /// The ranks that keep a push of this step from being answered.
  std::vector<std::uint32_t> ranks_behind(std::uint64_t step) const;
  /// A requester has gone.
  void drop(const Requester* from);
  /// Neither has anybody pushed nor is anything being received.
  bool idle() const { return slowest_.contains(0) && slowest_.size() == 1 && in_flight.empty(); }

  PartsInFlight in_flight;

 private:
  bool may_go(std::uint64_t step) const;

  const std::optional<std::uint32_t> staleness_;
  std::vector<std::uint64_t> clocks_;               // by rank
  std::map<std::uint64_t, std::uint32_t> slowest_;  // how many ranks there are by clock
  std::vector<Waiting> waiting_;
};

}  // namespace poseidon
