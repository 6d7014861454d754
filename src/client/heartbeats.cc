#include "client/heartbeats.h"

#include <algorithm>
#include <utility>

#include "client/duration_text.h"
#include "plan/mesh.h"

namespace poseidon {

namespace {

// With on_failure=rejoin or shrink the job goes on without a machine that has not answered for this long.
constexpr std::chrono::seconds kUnreachableTime{5};

// A rank that falls silent again and again does not fill the memory with notices.
constexpr int kMostTold = 64;

// Without progress for so long, a rank that waits may be one of those that wait for each other.
constexpr std::chrono::seconds kStandsAfter{2};

}  // namespace

Heartbeats::Heartbeats(Surroundings surroundings)
    : around_(std::move(surroundings)),
      vigil_(static_cast<std::size_t>(around_.options.world_size),
             neighbour_count(static_cast<std::size_t>(around_.options.world_size))),
      standstill_(static_cast<std::size_t>(around_.options.world_size), around_.connections.neighbours(),
                  2 * vigil_.interval()) {}

void Heartbeats::begin(std::chrono::milliseconds delay) {
  around_.loop.call_at(Clock::now() + delay, [this] { look(); });
}

void Heartbeats::end() { around_.loop.checked(ended_) = true; }

void Heartbeats::heard(std::size_t rank, std::uint32_t level) {
  around_.loop.checked(standstill_).heard(rank, level, now_ns());
}

void Heartbeats::note_wait(std::size_t rank, std::string waits_for) {
  around_.loop.checked(standstill_).note(rank, std::move(waits_for));
}

std::string Heartbeats::waits_of_others() const { return around_.loop.checked(standstill_).others(now_ns()); }

/// Runs at each interval of the vigil, until the client ends.
void Heartbeats::look() {
  if (ended_) return;
  if (beats_ = !beats_; beats_) beat();
  if (ended_) return;
  const auto signs_ns = around_.connections.signs_of_life();
  longest_silence_ns_.store(around_.connections.longest_silence_ns(signs_ns), std::memory_order_relaxed);
  const auto findings =
      vigil_.judge(now_ns(), signs_ns, [this](std::size_t rank) { return around_.connections.answer_of(rank); });
  for (const Vigil::Finding& finding : findings) tell(finding);
  if (around_.options.on_failure != OnFailure::abort) give_up_unreachable();
  around_.loop.call_at(Clock::now() + vigil_.interval(), [this] { look(); });
}

/// Sends the heartbeats. If all members wait for each other, nothing else will end the job.
void Heartbeats::beat() {
  Connections& connections = around_.connections;
  connections.beat(standstill_.beat(stands(), now_ns()));
  if (standstill_.is_to_tell()) connections.tell_waiting(around_.report.describe_waiting());
  if (!standstill_.all_stand()) return;
  around_.fail({ErrorCode::mismatch,
                concat(connections.here(), ": all ranks wait for each other, and nothing is under way. Rank ",
                       around_.options.rank, ": ", around_.report.describe_waiting(), waits_of_others(),
                       "; let all ranks make the same calls in the same order (each rank's traceback shows its own)")},
               {FailureSource::found});
}

/// See standstill.h. With stragglers=drop a server goes on by itself, when a time is over.
bool Heartbeats::stands() const {
  Connections& connections = around_.connections;
  connections.note_traffic();
  const std::int64_t since_ns = ran_since_ns(kStandsAfter);
  const bool may = around_.options.stragglers != Stragglers::drop && around_.all_take_part();
  const bool quiet = may && connections.last_progress_ns() < since_ns && around_.steps.all_wait_since(since_ns);
  return connections.is_idle(quiet) && quiet && around_.executor.idle();
}

void Heartbeats::tell(const Vigil::Finding& finding) {
  Notices& notices = around_.notices;
  if (++told_count_ > kMostTold) return;
  if (told_count_ == kMostTold) return notices.add("further silences are not told");
  const std::string name = around_.connections.name_of_rank(finding.rank);
  const std::string time = duration_text(finding.silence.count());
  switch (finding.news) {
    case Vigil::News::frozen:
      return notices.add("nothing has come from " + name + " for " + time +
                         "; its machine answers, but the process does not run (stopped, swapped out or starved)");
    case Vigil::News::unreachable:
      return notices.add("the machine of " + name + " has not answered for " + time +
                         " (down, stopped or cut off; if all others are named so, it is this machine)");
    case Vigil::News::back:
      return notices.add(name + " is heard again after " + time);
  }
}

/// Without this the job would wait for its timeout.
void Heartbeats::give_up_unreachable() {
  const Connections& connections = around_.connections;
  const auto patience = std::min<std::chrono::nanoseconds>(around_.options.timeout, kUnreachableTime);
  const std::int64_t time_ns = now_ns();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(around_.options.world_size); ++rank) {
    const auto silence = vigil_.unreachable_for(rank, time_ns);
    if (silence < patience) continue;
    FailureCause cause{FailureSource::lost};
    cause.party = FlightEvent::Party::peer;
    cause.index = static_cast<std::uint32_t>(rank);
    return around_.fail(
        {ErrorCode::peer_lost, connections.here() + " lost " + connections.name_of_rank(rank) +
                                   ": its machine has not answered for " + duration_text(silence.count()) +
                                   connections.where_it_is_cut() + connections.last_heard()},
        cause);
  }
}

}  // namespace poseidon
