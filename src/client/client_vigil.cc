// How a client watches the other ranks without waiting for them.
#include <algorithm>
#include <chrono>
#include <string>

#include "client/client_impl.h"
#include "client/duration_text.h"

namespace poseidon {

namespace {

// With on_failure=rejoin or shrink the job goes on without a machine that has not answered for this long.
constexpr std::chrono::seconds kUnreachableTime{5};

// A rank that falls silent again and again does not fill the memory with notices.
constexpr int kMostTold = 64;

// Without progress for so long, a rank that waits may be one of those that wait for each other.
constexpr std::chrono::seconds kStandsAfter{2};

}  // namespace

/// Runs at each interval of the vigil, until the job ends here.
void ClientImpl::keep_vigil() {
  loop_->check_thread();
  if (closing_) return;
  if (beats_ = !beats_; beats_) beat();
  if (closing_) return;
  const auto signs_ns = connections_.signs_of_life();
  longest_silence_ns_.store(connections_.longest_silence_ns(signs_ns), std::memory_order_relaxed);
  const auto findings =
      vigil_.judge(now_ns(), signs_ns, [this](std::size_t rank) { return connections_.answer_of(rank); });
  for (const Vigil::Finding& finding : findings) tell(finding);
  if (options_.on_failure != OnFailure::abort) give_up_unreachable();
  loop_->call_at(Clock::now() + vigil_.interval(), [this] { keep_vigil(); });
}

/// Sends the heartbeats. If all members wait for each other, nothing else will end the job.
void ClientImpl::beat() {
  const std::int64_t time_ns = now_ns();
  connections_.beat(standstill_.beat(stands(), time_ns));
  if (standstill_.is_to_tell()) connections_.tell_waiting(report_.describe_waiting());
  if (!standstill_.all_stand()) return;
  fail({ErrorCode::mismatch,
        connections_.here() + ": all ranks wait for each other, and nothing is under way. Rank " +
            std::to_string(options_.rank) + ": " + report_.describe_waiting() + standstill_.others(time_ns) +
            "; let all ranks make the same calls in the same order (each rank's traceback shows its own)"},
       {FailureSource::found});
}

/// See standstill.h. With stragglers=drop a server goes on by itself, when a time is over.
bool ClientImpl::stands() {
  connections_.note_traffic();
  const std::int64_t since_ns = ran_since_ns(kStandsAfter);
  const bool may = options_.stragglers != Stragglers::drop && !leaving_ && !departure_ && leavers_.empty();
  const bool quiet = may && connections_.last_progress_ns() < since_ns && steps_.all_wait_since(since_ns);
  return connections_.is_idle(quiet) && quiet && executor_->idle();
}

void ClientImpl::tell(const Vigil::Finding& finding) {
  if (++told_count_ > kMostTold) return;
  if (told_count_ == kMostTold) return notices_.add("further silences are not told");
  const std::string name = connections_.name_of_rank(finding.rank);
  const std::string time = duration_text(finding.silence.count());
  switch (finding.news) {
    case Vigil::News::frozen:
      return notices_.add("nothing has come from " + name + " for " + time +
                          "; its machine answers, but the process does not run (stopped, swapped out or starved)");
    case Vigil::News::unreachable:
      return notices_.add("the machine of " + name + " has not answered for " + time +
                          " (down, stopped or cut off; if all others are named so, it is this machine)");
    case Vigil::News::back:
      return notices_.add(name + " is heard again after " + time);
  }
}

/// Without this the job would wait for its timeout.
void ClientImpl::give_up_unreachable() {
  const auto patience = std::min<std::chrono::nanoseconds>(options_.timeout, kUnreachableTime);
  const std::int64_t time_ns = now_ns();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(options_.world_size); ++rank) {
    const auto silence = vigil_.unreachable_for(rank, time_ns);
    if (silence < patience) continue;
    FailureCause cause{FailureSource::lost};
    cause.party = FlightEvent::Party::peer;
    cause.index = static_cast<std::uint32_t>(rank);
    return fail({ErrorCode::peer_lost, connections_.here() + " lost " + connections_.name_of_rank(rank) +
                                           ": its machine has not answered for " + duration_text(silence.count()) +
                                           connections_.where_it_is_cut() + connections_.last_heard()},
                cause);
  }
}

}  // namespace poseidon
