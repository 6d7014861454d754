#include "server/pace/drop_late.h"

#include <algorithm>

#include "base/clock.h"
#include "server/chunk/limits.h"

namespace poseidon {

namespace {

// A rank is reported if it is late in more than one of this many steps, once there have been this many.
constexpr std::uint64_t kRarely = 10;
constexpr std::uint64_t kStepsToJudge = 20;

Status still_arriving(const wire::Contribution& push) {
  return {ErrorCode::refused,
          concat("rank ", push.rank, " pushes step ", push.step, " while an earlier push is still arriving")};
}

}  // namespace

DropLate::DropLate(DroppingShard& shard, PacedChunk& chunk)
    : shard_(shard),
      chunk_(chunk),
      arrivals_(shard.surroundings_.worker_count),
      results_(shard.surroundings_.worker_count, shard.surroundings_.pool),
      late_steps_(shard.surroundings_.worker_count, 0) {}

DropLate::~DropLate() {
  if (deadline_ns_ != 0) shard_.deadlines_.erase({deadline_ns_, this});  // the timer's loop may have ended
}

Status DropLate::admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) {
  if (results_.has_ended(push.step)) {
    const auto size_bytes = contribution_bytes(push, late_steps_.size());
    if (!size_bytes.ok()) return size_bytes.status();
    // If the open step ends without it, what comes to that step from this rank goes to the place of the late push.
    const auto& open = chunk.state.parts()[push.rank];
    if (open && !open->complete) return still_arriving(push);
    return results_.admit(push, size_bytes.value());
  }
  if (results_.incoming.has(push.rank)) return still_arriving(push);
  return WaitForAll::admit(chunk, push, from);
}

std::span<std::byte> DropLate::place(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
                                     std::shared_ptr<const void> turn) {
  if (results_.has_ended(push.step)) return results_.incoming.place(push.rank, &from, std::move(buffer));
  return WaitForAll::place(chunk, push, from, std::move(buffer), std::move(turn));
}

void DropLate::progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) {
  if (!results_.has_ended(push.step)) WaitForAll::progress(chunk, push, received_bytes);
}

void DropLate::complete(PacedChunk& chunk, const wire::Contribution& push) {
  if (!results_.has_ended(push.step)) {
    chunk.state.complete(push.rank, chunk.state.parts()[push.rank]->payload, nullptr);
    return arrived(chunk, push.rank);
  }
  IncomingParts::Part part = results_.incoming.take(push.rank);
  shard_.surroundings_.pool->give_back(std::move(part.buffer));
  results_.answer(push, *part.from);
  end_without_missing(chunk);  // a step that is overdue may have waited for this rank
}

void DropLate::add(PacedChunk& chunk, const wire::Contribution& push, Requester& from,
                   std::span<const std::byte> payload, std::function<void()> release) {
  if (!results_.has_ended(push.step)) {
    chunk.state.complete(push.rank, payload, std::move(release));
    return arrived(chunk, push.rank);
  }
  results_.answer(push, from);
  end_without_missing(chunk);
  if (release) release();
}

/// Notes that a contribution to the open step is complete. The one after which more than half of the ranks have
/// contributed sets the deadline.
void DropLate::arrived(PacedChunk& chunk, std::uint32_t rank) {
  if (chunk.state.is_mean()) {
    const std::int64_t time_ns = now_ns();
    const bool counts = !chunk.state.parts()[rank]->push.excluded_from_mean;
    const bool decides = counts && arrivals_.add(rank, time_ns);
    if (decides && !chunk.state.all_here())
      if (const auto deadline = shard_.spread_.deadline_ns(chunk.state.shape().step, time_ns, shard_.factor_))
        shard_.set_deadline(*this, *deadline);
  }
  chunk.finish_if_all_here();
}

void DropLate::deadline_passed() {
  deadline_ns_ = 0;
  overdue_ = true;
  end_without_missing(chunk_);
}

/// Ends a step that is overdue if it may end: more than half of the ranks have contributed, no rank is too far behind,
/// and there is room for the results that are kept.
void DropLate::end_without_missing(PacedChunk& chunk) {
  if (!overdue_ || !arrivals_.more_than_half() || results_.kept_count() >= shard_.most_kept_steps_ ||
      !chunk.state.is_mean())
    return;
  // Ending the step takes memory beside what is kept: for the update, and for the sum if its parts are lent.
  const wire::Contribution& shape = chunk.state.shape();
  if (!shard_.surroundings_.pool->has_room(shape.value_bytes() + chunk.update_bytes(shape)) ||
      !results_.make_room(shape.value_bytes()))
    return;
  for (Contribution& part : chunk.state.leave_out_missing())
    results_.incoming.place(part.push.rank, part.from, std::move(part.buffer));
  chunk.finish_if_all_here();
}

void DropLate::step_ended(PacedChunk& chunk, const wire::Header& result,
                          const Result<std::shared_ptr<const Buffer>>& payload) {
  shard_.clear_deadline(*this);
  if (arrivals_.more_than_half()) shard_.spread_.add(arrivals_.deviation_ns());
  arrivals_.reset();
  for (const auto rank : chunk.state.left_out()) shard_.count_late(*this, rank, result.step);
  results_.end(result, payload, chunk.state.left_out());
}

void DropLate::drop(PacedChunk& chunk, const Requester& from) {
  results_.incoming.drop(&from, *shard_.surroundings_.pool);
  for (const auto rank : chunk.state.missing_ranks()) arrivals_.remove(rank);
  // The next contribution that makes it more than half sets a deadline.
  if (!arrivals_.more_than_half()) shard_.clear_deadline(*this);
}

DroppingShard::DroppingShard(const wire::Pace& pace, PaceSurroundings surroundings)
    : ShardPace({.drops_late_ranks = true,
                 .bytes_of_a_chunk = sizeof(DropLate) + limits::kNodeBytes +  // for a deadline
                                     surroundings.worker_count * (sizeof(std::int64_t) + sizeof(std::uint64_t))}),
      most_kept_steps_(pace.bound),
      factor_(pace.factor),
      surroundings_(std::move(surroundings)),
      noticed_(surroundings_.worker_count, false) {
  for (std::uint32_t rank = 0; rank < surroundings_.worker_count; ++rank) late_ranks_.push_back({rank});
}

std::shared_ptr<ChunkPace> DroppingShard::chunk_pace(PacedChunk& chunk) {
  return std::make_shared<DropLate>(*this, chunk);
}

void DroppingShard::set_deadline(DropLate& chunk, std::int64_t time_ns) {
  clear_deadline(chunk);
  chunk.deadline_ns_ = time_ns;
  deadlines_.emplace(time_ns, &chunk);
  wake_in_time();
}

void DroppingShard::clear_deadline(DropLate& chunk) {
  chunk.overdue_ = false;
  if (const std::int64_t time_ns = std::exchange(chunk.deadline_ns_, 0); time_ns != 0)
    deadlines_.erase({time_ns, &chunk});
  if (deadlines_.empty()) wake_in_time();
}

/// Sets one timer. It may fire before the next deadline, but not after it. Without deadlines there is no timer.
void DroppingShard::wake_in_time() {
  const std::int64_t time_ns = deadlines_.empty() ? INT64_MAX : deadlines_.begin()->first;
  Loop* const loop = surroundings_.loop;
  if (loop == nullptr || (time_ns >= wakes_ns_ && !deadlines_.empty())) return;
  loop->cancel(std::exchange(wake_timer_, 0));
  wakes_ns_ = time_ns;
  if (deadlines_.empty()) return;
  wake_timer_ = loop->call_at(time_of(time_ns), [this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    wakes_ns_ = INT64_MAX;
    end_late_steps(now_ns());
  });
}

void DroppingShard::end_late_steps(std::int64_t time_ns) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= time_ns)
    deadlines_.extract(deadlines_.begin()).value().second->deadline_passed();
  wake_in_time();
}

/// Counts each chunk's steps separately, because steps of different models are not the same.
void DroppingShard::count_late(DropLate& chunk, std::uint32_t rank, std::uint64_t step) {
  const std::uint64_t late_steps = ++chunk.late_steps_[rank];
  LateRank& counted = late_ranks_[rank];
  ++counted.late_chunks;
  counted.last_step = std::max(counted.last_step, step);
  counted.late_steps = std::max(counted.late_steps, late_steps);
  const std::uint64_t judged_steps = step - ArrivalSpread::kLearningSteps;
  if (!surroundings_.on_notice || noticed_[rank] || judged_steps < kStepsToJudge ||
      late_steps * kRarely <= judged_steps)
    return;
  noticed_[rank] = true;
  surroundings_.on_notice(
      rank,
      concat("rank ", rank, " comes late: ", late_steps, " of the last ", judged_steps,
             " steps ended without its gradients (stragglers=drop), so that its data counts less in the training; "
             "find out what slows its host down, or raise straggler_factor"));
}

std::vector<LateRank> DroppingShard::late_ranks() const {
  std::vector<LateRank> late = late_ranks_;
  std::erase_if(late, [](const LateRank& one) { return one.late_chunks == 0; });
  return late;
}

}  // namespace poseidon
