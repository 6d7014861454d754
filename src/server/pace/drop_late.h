// DropLate: a chunk's steps end without ranks that come much later than the others (stragglers=drop).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/pinned.h"
#include "server/pace/arrivals.h"
#include "server/pace/late_results.h"
#include "server/pace/wait_for_all.h"

namespace poseidon {

class DroppingShard;

/// When more than half of the ranks have contributed, the step gets a deadline. A contribution that comes after its
/// step has ended is discarded, and answered with that step's result (late_results.h).
class DropLate final : public WaitForAll, private Pinned {
 public:
  DropLate(DroppingShard& shard, PacedChunk& chunk);
  ~DropLate() override;

  Status admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) override;
  std::span<std::byte> place(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
                             std::shared_ptr<const void> turn) override;
  void progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) override;
  void complete(PacedChunk& chunk, const wire::Contribution& push) override;
  void add(PacedChunk& chunk, const wire::Contribution& push, Requester& from, std::span<const std::byte> payload,
           std::function<void()> release) override;
  void step_ended(PacedChunk& chunk, const wire::Header& result,
                  const Result<std::shared_ptr<const Buffer>>& payload) override;
  void drop(PacedChunk& chunk, const Requester& from) override;
  bool idle() const override { return results_.idle(); }

  /// Notes that the open step's deadline has passed. May end the step.
  void deadline_passed();

 private:
  friend class DroppingShard;
  void arrived(PacedChunk& chunk, std::uint32_t rank);
  void end_without_missing(PacedChunk& chunk);

  DroppingShard& shard_;
  PacedChunk& chunk_;
  Arrivals arrivals_;
  LateResults results_;
  std::vector<std::uint64_t> late_steps_;  // by rank: the steps that have ended without it
  // The open step's deadline, which is in the shard's deadlines_; 0: there is none yet, or it is over.
  std::int64_t deadline_ns_ = 0;
  bool overdue_ = false;  // the open step waits only for ranks that are too far behind
};

/// Deadlines and the ranks that miss them. The chunks share one timer and the measured spread of arrivals.
class DroppingShard final : public ShardPace {
 public:
  DroppingShard(const wire::Pace& pace, PaceSurroundings surroundings);

  std::shared_ptr<ChunkPace> chunk_pace(PacedChunk& chunk) override;
  void end_late_steps(std::int64_t time_ns) override;
  std::vector<LateRank> late_ranks() const override;

 private:
  friend class DropLate;
  void set_deadline(DropLate& chunk, std::int64_t time_ns);
  void clear_deadline(DropLate& chunk);
  void wake_in_time();
  void count_late(DropLate& chunk, std::uint32_t rank, std::uint64_t step);

  const std::uint32_t most_kept_steps_;  // for each chunk
  const float factor_;                   // the length of a wait, in deviations
  const PaceSurroundings surroundings_;
  ArrivalSpread spread_;
  std::set<std::pair<std::int64_t, DropLate*>> deadlines_;  // the deadlines of open steps: time in ns, chunk
  Loop::TimerId wake_timer_ = 0;                            // 0: none is set
  std::int64_t wakes_ns_ = INT64_MAX;                       // when `wake_timer_` fires
  std::vector<LateRank> late_ranks_;                        // by rank
  std::vector<bool> noticed_;                               // by rank

  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for the timer
};

}  // namespace poseidon
