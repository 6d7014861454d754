// How a ServerCore keeps jobs to Options::rate_limit (rate_limit.h).
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "server/core/connection.h"
#include "server/core/rate_limit.h"
#include "server/core/server_core.h"

namespace poseidon {

/// Looks again at what waits, when a job may receive again that has been ahead of its rate, and before that from time
/// to time: another job may be free sooner, and so may this one, because what coding saves is given back when it has
/// left.
void ServerCore::resume_at(std::int64_t time_ns) {
  if (std::exchange(resumption_planned_, true)) return;
  constexpr std::chrono::nanoseconds kSoon = RateLimit::kAhead / 2;
  loop_->call_at(time_of(std::min(time_ns, now_ns() + kSoon.count())), [this] {
    resumption_planned_ = false;
    for (const auto& [name, job] : jobs_) resume_waiting(*job);
    for (const auto& job : replaced_jobs_) resume_waiting(*job);
  });
}

}  // namespace poseidon
