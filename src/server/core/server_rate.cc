// How a ServerCore keeps jobs to Options::rate_limit (rate_limit.h).
#include <utility>

#include "base/clock.h"
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

/// Looks again at what waits, when a job may receive again that has been ahead of its rate. A time that is too early
/// for another job costs one look more.
void ServerCore::resume_at(std::int64_t time_ns) {
  if (std::exchange(resumption_planned_, true)) return;
  loop_->call_at(time_of(time_ns), [this] {
    resumption_planned_ = false;
    for (const auto& [name, job] : jobs_) resume_waiting(*job);
    for (const auto& job : replaced_jobs_) resume_waiting(*job);
  });
}

}  // namespace poseidon
