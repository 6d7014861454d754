// LateResults: the results of one chunk's steps that have ended without some ranks (stragglers=drop).
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "server/pace/parts_in_flight.h"
#include "wire/header.h"

namespace poseidon {

/// A rank that a step did not wait for pushes it later, gets the result that all others got, and goes on to the next:
/// so all replicas go through the same results. What it pushed is discarded. Loop thread of its shard only.
///
/// No rank pushes a step before it has the result of the one before. So whoever has yet to push the oldest step that
/// is kept has yet to push all of them, and as many steps are kept as the slowest rank is behind.
class LateResults {
 public:
  LateResults(std::uint32_t worker_count, std::shared_ptr<BufferPool> pool);

  bool has_ended(std::uint64_t step) const { return step <= last_step_; }
  std::size_t kept_count() const { return kept_.size(); }
  /// Neither keeps nor receives anything.
  bool idle() const { return kept_.empty() && in_flight.empty(); }

  /// Before a step ends without some ranks, with a result of `size_bytes`: false where the job's memory has no room to
  /// keep it.
  bool make_room(std::size_t size_bytes);
  /// A step has ended with `payload`, without `ranks`. `result`: what the others' answers began with.
  void end(const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload,
           std::vector<std::uint32_t> ranks);
  /// Refuses a contribution of `size_bytes` to an ended step that was not waiting for it or is of another size.
  Status admit(const wire::Header& header, std::size_t size_bytes) const;
  /// Such a contribution is here: answers it with the step's result. Does nothing for one that was not admitted.
  void answer(const wire::Header& header, Requester& to);

  PartsInFlight in_flight;  // to be discarded

 private:
  struct Ended {
    wire::Header result;
    Result<std::shared_ptr<const Buffer>> payload;
    std::vector<std::uint32_t> ranks;  // that have yet to push it
    std::size_t payload_bytes = 0;     // of the pool's
  };
  std::list<Ended>::const_iterator find(const wire::Header& header) const;

  const std::shared_ptr<BufferPool> pool_;
  const std::size_t ended_bytes_;  // what an entry costs beside its payload
  std::size_t room_bytes_ = 0;     // for the result of the step that ends now
  std::uint64_t last_step_ = 0;
  std::list<Ended> kept_;  // the oldest first
};

}  // namespace poseidon
