// Whom a shard's steps wait for: late ranks with stragglers=drop, and pushes that are applied one by one with
// consistency=ssp and async (docs/decisions/0019-stragglers.md).
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/clock.h"
#include "kernel/kernel.h"
#include "server/chunk/limits.h"
#include "server/chunk/push_refusal.h"
#include "server/core/shard.h"

namespace poseidon {

namespace {

// Steps of a chunk that wait for everybody, while it is learnt how far apart the ranks usually are.
constexpr std::uint64_t kLearningSteps = 10;
// A rank that is late in more than one of so many steps is told of, when there have been some.
constexpr std::uint64_t kRarely = 10;
constexpr std::uint64_t kStepsToJudge = 20;

std::optional<std::uint32_t> staleness_of(const wire::Pace& pace) {
  return pace.consistency == Consistency::ssp ? std::optional(pace.bound) : std::nullopt;
}

}  // namespace

void Shard::set_pace(const wire::Pace& pace, Loop* loop,
                     std::function<void(std::uint32_t, const std::string&)> on_notice) {
  pace_ = pace;
  loop_ = loop;
  on_notice_ = std::move(on_notice);
  if (pace.stragglers == Stragglers::drop) {
    // What is still being received when a step ends must not be in its sum.
    reduction_.aggregation = Aggregation::at_once;
    entry_bytes_ += sizeof(Late) + worker_count_ * (sizeof(std::int64_t) + sizeof(std::uint64_t));
    entry_bytes_ += limits::kNodeBytes;  // of a deadline
    noticed_.assign(worker_count_, false);
    for (std::uint32_t rank = 0; rank < worker_count_; ++rank) late_ranks_.push_back({rank});
  }
  if (pace.consistency != Consistency::bsp) entry_bytes_ += sizeof(RankClocks) + worker_count_ * sizeof(std::uint64_t);
}

/// Before a contribution is admitted. What is under way in the entry's state stays there.
void Shard::prepare(Entry& entry, const wire::Header& header) const {
  if (pace_ == wire::Pace() || entry.state.started()) return;
  if (pace_.stragglers == Stragglers::drop && !entry.late) entry.late = std::make_unique<Late>(worker_count_, pool_);
  if (pace_.consistency != Consistency::bsp && (header.flags & wire::kStored) != 0 && !entry.clocks)
    entry.clocks = std::make_unique<RankClocks>(worker_count_, staleness_of(pace_));
}

/// Whether it is in no step's sum: its step has ended, or there are no steps.
bool Shard::stands_apart(const Entry& entry, const wire::Header& header) {
  return entry.clocks != nullptr || (entry.late != nullptr && entry.late->results.has_ended(header.step));
}

PartsInFlight& Shard::parts_apart(Entry& entry) const {
  return entry.clocks ? entry.clocks->in_flight : entry.late->results.in_flight;
}

Status Shard::admit_apart(Entry& entry, const wire::Header& header) {
  const auto size_bytes = contribution_bytes(header, worker_count_);
  if (!size_bytes.ok()) return size_bytes.status();
  if (!entry.clocks) return entry.late->results.admit(header, size_bytes.value());
  const UpdateRule* rule = rule_of(header);
  if (header.kind != wire::Kind::push || (header.flags & wire::kStored) == 0 || rule == nullptr ||
      rule->kind == UpdateKind::none)
    return refused_push(
        header,
        "with consistency=ssp and async pushes are applied one by one, which takes a dense gradient and "
        "an update rule that this rank has sent");
  return entry.clocks->admit(header);
}

void Shard::complete_apart(Entry& entry, const wire::Header& header) {
  PartsInFlight::Part part = parts_apart(entry).take(header.rank);
  const std::span<const std::byte> payload = part.buffer.span();
  finish_apart(entry, header, *part.from, std::move(part.buffer), payload);
}

/// `payload` is in `buffer`, or lent.
void Shard::finish_apart(Entry& entry, const wire::Header& header, Requester& from, Buffer buffer,
                         std::span<const std::byte> payload) {
  if (entry.clocks) {
    const Status status = apply(entry, header, std::move(buffer), payload);
    if (!status.ok()) return from.refuse(header, status);
    entry.clocks->tick(header, from);
    return answer_released(entry);
  }
  pool_->give_back(std::move(buffer));
  entry.late->results.answer(header, from);
  end_without_missing(entry);  // which may have waited for this rank
}

/// One rank's gradient, which the divisor makes its share of a mean.
Status Shard::apply(Entry& entry, const wire::Header& header, Buffer buffer, std::span<const std::byte> payload) {
  if ((header.flags & wire::kAbsent) != 0) return {};
  if (!buffer) buffer = pool_->try_take(payload.size());
  if (!buffer) return no_room(payload.size());
  const std::byte* gradient = payload.data();
  kernel::sum({&gradient, 1}, buffer.data(), payload.size() / dtype_bytes(header.dtype), header.dtype, header.divisor);
  return store(entry, std::move(buffer), header).status();
}

/// With what the chunk's value is now: it has what all ranks had pushed when the answer could go.
void Shard::answer_released(Entry& entry) {
  for (const RankClocks::Waiting& one : entry.clocks->release()) {
    wire::Header header = one.header;
    header.kind = wire::Kind::result;
    auto value = stored_of(entry).array(0);
    header.flags = static_cast<std::uint8_t>(value ? 0 : wire::kAbsent);
    one.to->send(header, (one.header.flags & wire::kNoResult) == 0 ? std::move(value) : nullptr);
  }
}

/// A contribution to the open step is complete.
void Shard::arrived(Entry& entry, std::uint32_t rank) {
  if (entry.late && entry.state.is_mean()) {
    const std::int64_t time_ns = now_ns();
    const wire::Header& shape = entry.state.shape();
    const bool counts = (entry.state.parts()[rank]->header.flags & wire::kLate) == 0;
    const bool decides = counts && entry.late->arrivals.add(rank, time_ns);
    if (decides && shape.step > kLearningSteps && !entry.state.all_here())
      set_deadline(key_of(shape), *entry.late, time_ns + spread_.wait_ns(pace_.factor));
  }
  finish_if_all_here(entry);
}

void Shard::set_deadline(std::uint64_t key, Late& late, std::int64_t time_ns) {
  clear_deadline(key, late);
  late.deadline_ns = time_ns;
  deadlines_.emplace(time_ns, key);
  wake_in_time();
}

void Shard::clear_deadline(std::uint64_t key, Late& late) {
  late.overdue = false;
  if (const std::int64_t time_ns = std::exchange(late.deadline_ns, 0); time_ns != 0) deadlines_.erase({time_ns, key});
  if (deadlines_.empty()) wake_in_time();
}

/// One timer, which may go off before the next deadline but not after it; none without deadlines.
void Shard::wake_in_time() {
  const std::int64_t time_ns = deadlines_.empty() ? INT64_MAX : deadlines_.begin()->first;
  if (loop_ == nullptr || (time_ns >= wakes_ns_ && !deadlines_.empty())) return;
  loop_->cancel(std::exchange(wake_timer_, 0));
  wakes_ns_ = time_ns;
  if (deadlines_.empty()) return;
  wake_timer_ =
      loop_->call_at(Clock::time_point(std::chrono::nanoseconds(time_ns)), [this, alive = std::weak_ptr<bool>(alive_)] {
        if (alive.expired()) return;
        wakes_ns_ = INT64_MAX;
        end_late_steps(now_ns());
      });
}

void Shard::end_late_steps(std::int64_t time_ns) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= time_ns) {
    Entry& entry = entries_.at(deadlines_.extract(deadlines_.begin()).value().second);
    entry.late->deadline_ns = 0;
    entry.late->overdue = true;
    end_without_missing(entry);
  }
  wake_in_time();
}

/// Ends a step that is overdue, if that may be: with more than half of the ranks, none too far behind, and room for
/// the results that are kept.
void Shard::end_without_missing(Entry& entry) {
  Late& late = *entry.late;
  if (!late.overdue || !late.arrivals.more_than_half() || late.results.kept_count() >= pace_.bound ||
      !entry.state.is_mean())
    return;
  // What ending it takes beside what is kept: the sum, where its parts are lent, and the update.
  const wire::Header& shape = entry.state.shape();
  if (!pool_->has_room(shape.payload_bytes + update_bytes(shape)) || !late.results.make_room(shape.payload_bytes))
    return;
  for (Contribution& part : entry.state.leave_out_missing())
    late.results.in_flight.place(part.header.rank, part.from, std::move(part.buffer));
  finish_if_all_here(entry);
}

/// `result`: what its answers begin with. The state still knows who was in.
void Shard::step_ended(Entry& entry, const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload) {
  Late& late = *entry.late;
  clear_deadline(key_of(result), late);
  if (late.arrivals.more_than_half()) spread_.add(late.arrivals.deviation_ns());
  late.arrivals.reset();
  for (const auto rank : entry.state.left_out()) count_late(late, rank, result.step);
  late.results.end(result, payload, entry.state.left_out());
}

/// Each chunk counts its own steps: those of different models are not the same.
void Shard::count_late(Late& late, std::uint32_t rank, std::uint64_t step) {
  const std::uint64_t late_steps = ++late.late_steps[rank];
  LateRank& counted = late_ranks_[rank];
  ++counted.late_chunks;
  counted.last_step = std::max(counted.last_step, step);
  counted.late_steps = std::max(counted.late_steps, late_steps);
  const std::uint64_t judged_steps = step - kLearningSteps;
  if (!on_notice_ || noticed_[rank] || judged_steps < kStepsToJudge || late_steps * kRarely <= judged_steps) return;
  noticed_[rank] = true;
  on_notice_(rank, "rank " + std::to_string(rank) + " comes late: " + std::to_string(late_steps) + " of the last " +
                       std::to_string(judged_steps) +
                       " steps ended without its gradients (stragglers=drop), and what only it learns from is "
                       "underrepresented; see what slows its host down, or raise straggler_factor");
}

std::vector<LateRank> Shard::late_ranks() const {
  std::vector<LateRank> late = late_ranks_;
  std::erase_if(late, [](const LateRank& one) { return one.late_chunks == 0; });
  return late;
}

void Shard::drop_apart(std::uint64_t key, Entry& entry, const Requester& from) {
  if (entry.clocks) {
    entry.clocks->drop(&from);
    entry.clocks->in_flight.drop(&from, *pool_);
  }
  if (!entry.late) return;
  entry.late->results.in_flight.drop(&from, *pool_);
  for (const auto rank : entry.state.missing_ranks()) entry.late->arrivals.remove(rank);
  if (!entry.late->arrivals.more_than_half()) clear_deadline(key, *entry.late);  // the next one that makes it sets one
}

}  // namespace poseidon
