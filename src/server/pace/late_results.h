// LateResults: the results of one chunk's steps that have ended without some ranks (stragglers=drop).
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/one_thread.h"
#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "server/pace/incoming_parts.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// A late rank pushes a step after it has ended, gets the result that all others got, and goes on to the next step. So
/// all replicas go through the same results. Its contribution is discarded. Only the loop thread of its shard uses it.
///
/// No rank pushes a step before it has the result of the step before. So a rank that has yet to push the oldest kept
/// step has yet to push all kept steps, and the number of kept steps is that by which the slowest rank is behind.
class LateResults {
 public:
  LateResults(std::uint32_t worker_count, std::shared_ptr<BufferPool> pool);

  bool has_ended(std::uint64_t step) const { return step <= one_thread_.checked(last_step_); }
  std::size_t kept_count() const { return one_thread_.checked(kept_).size(); }
  /// Whether it neither keeps nor receives anything.
  bool idle() const { return one_thread_.checked(kept_).empty() && incoming.empty(); }

  /// Reserves memory for the result of `size_bytes` of a step that is about to end without some ranks. Returns false if
  /// the job's memory has no room for it.
  bool make_room(std::size_t size_bytes);
  /// Notes that a step has ended with `payload`, without `ranks`. `result` is the header of the others' answers.
  void end(const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload,
           std::vector<std::uint32_t> ranks);
  /// Checks a contribution of `size_bytes` to an ended step. ErrorCode::refused: the step does not wait for it, or has
  /// another size.
  Status admit(const wire::Contribution& push, std::size_t size_bytes) const;
  /// Answers an admitted contribution, which has arrived, with the step's result. Does nothing for one that was not
  /// admitted.
  void answer(const wire::Contribution& push, Requester& to);

  IncomingParts incoming;  // of late ranks; to be discarded

 private:
  struct Ended {
    wire::Header result;
    Result<std::shared_ptr<const Buffer>> payload;
    std::vector<std::uint32_t> ranks;  // the ranks that have yet to push it
    std::size_t payload_bytes = 0;     // taken from the pool
  };
  std::list<Ended>::const_iterator find(const wire::Contribution& push) const;

  const std::shared_ptr<BufferPool> pool_;
  const std::size_t ended_bytes_;  // the memory of an entry beside its payload
  std::size_t room_bytes_ = 0;     // reserved for the result of the step that ends now
  std::uint64_t last_step_ = 0;
  std::list<Ended> kept_;  // the oldest first
  [[no_unique_address]] OneThread one_thread_{"LateResults"};
};

}  // namespace poseidon
