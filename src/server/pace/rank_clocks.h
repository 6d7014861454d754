// RankClocks: how far each rank is with one chunk whose pushes are applied one by one (consistency=ssp, async).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/one_thread.h"
#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "server/pace/incoming_parts.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// A rank's clock is the last step that it has pushed. Only the loop thread of its shard uses it.
class RankClocks {
 public:
  /// A push that has not been answered.
  struct Waiting {
    wire::Contribution push;
    Requester* to = nullptr;
    std::int64_t since_ns = 0;
  };

  /// `staleness` is the number of steps by which an answered push may be ahead of the slowest rank. Empty: no bound.
  RankClocks(std::uint32_t worker_count, std::optional<std::uint32_t> staleness);

  /// ErrorCode::refused: the push is not the rank's next step, or it came before the answer to the rank's last push.
  Status admit(const wire::Contribution& push) const;
  /// Notes that an admitted push has been applied and waits for its answer.
  void tick(const wire::Contribution& push, Requester& from);
  /// Returns the pushes that are to be answered now, in the order in which they came.
  std::vector<Waiting> release();
  const std::vector<Waiting>& waiting() const { return one_thread_.checked(waiting_); }
  /// Returns the ranks that keep a push of this step from being answered.
  std::vector<std::uint32_t> ranks_behind(std::uint64_t step) const;
  /// Forgets a requester that has left.
  void drop(const Requester* from);
  /// Whether nobody has pushed yet and nothing is being received.
  bool idle() const { return one_thread_.checked(slowest_).contains(0) && slowest_.size() == 1 && incoming.empty(); }

  IncomingParts incoming;

 private:
  bool may_go(std::uint64_t step) const;

  const std::optional<std::uint32_t> staleness_;
  std::vector<std::uint64_t> clocks_;               // by rank
  std::map<std::uint64_t, std::uint32_t> slowest_;  // by clock: the number of ranks
  std::vector<Waiting> waiting_;
  [[no_unique_address]] OneThread one_thread_{"RankClocks"};
};

}  // namespace poseidon
