#include "server/core/tenants.h"

#include <algorithm>

#include "server/chunk/limits.h"

namespace poseidon {

std::string evicted_text(const JobName& job) {
  return "the operator of this server has evicted job '" + job.name +
         "'; ask the operator why, then start the job again or give it other servers";
}

Result<Allowance> Tenants::admit(const JobName& job, const JobRun& run) {
  const std::lock_guard lock(mutex_);
  forget_gone();
  if (Status why = objection_locked(job, run); !why.ok()) return why;
  auto tenant = find(job);
  if (!tenant) {
    const auto count = std::ranges::count_if(tenants_, [&](const auto& e) { return e.first.key_id == job.key_id; });
    if (count >= max_jobs_)
      return Status(ErrorCode::refused, concat("this server already serves max_jobs=", max_jobs_,
                                               " jobs; start it with a higher max_jobs"));
    tenant = std::make_shared<Tenant>(memory_limit_, server_memory_, rate_limit_);
    tenants_[job] = tenant;
  }
  tenant->run = run;
  lost_.erase(job);
  evicted_.erase(job);
  return Allowance{std::shared_ptr<MemoryBudget>(tenant, &tenant->budget), tenant->rate};
}

Status Tenants::objection(const JobName& job, const JobRun& run) const {
  const std::lock_guard lock(mutex_);
  return objection_locked(job, run);
}

Status Tenants::objection_locked(const JobName& job, const JobRun& run) const {
  if (keeps_out(job, run)) return {ErrorCode::evicted, evicted_text(job)};
  if (!draining_) return {};
  const auto tenant = find(job);
  const auto lost = lost_.find(job);
  const bool known = (tenant && tenant->run.goes_on_as(run)) ||
                     (lost != lost_.end() && may_come_back(lost->second) && lost->second.run.goes_on_as(run));
  if (known) return {};
  return {ErrorCode::refused, "this server is being drained and takes no new job; give job '" + job.name +
                                  "' other servers (--servers or POSEIDON_SERVERS)"};
}

bool Tenants::drained() {
  const std::lock_guard lock(mutex_);
  forget_gone();
  return draining_ && tenants_.empty() && lost_.empty();
}

bool Tenants::keeps_out(const JobName& job, const JobRun& run) const {
  const auto evicted = evicted_.find(job);
  return evicted != evicted_.end() && evicted->second.goes_on_as(run);
}

void Tenants::note_lost(const JobName& job, const JobRun& run, std::uint32_t worker_count) {
  const std::lock_guard lock(mutex_);
  forget_gone();
  if (keeps_out(job, run)) return;
  // One tenant cannot take the places of others.
  const auto count = std::ranges::count_if(lost_, [&](const auto& e) { return e.first.key_id == job.key_id; });
  if (count < max_jobs_ || lost_.contains(job)) lost_[job] = {run, worker_count, Clock::now()};
}

std::map<JobName, Tenants::Lost> Tenants::lost_jobs() {
  const std::lock_guard lock(mutex_);
  forget_gone();
  return lost_;
}

std::optional<JobRun> Tenants::evict(const JobName& job) {
  const std::lock_guard lock(mutex_);
  forget_gone();
  const auto tenant = find(job);
  const auto lost = lost_.find(job);
  if (!tenant && lost == lost_.end()) return std::nullopt;
  if (evicted_.size() >= limits::kRememberedJobs) evicted_.erase(evicted_.begin());
  evicted_[job] = tenant ? tenant->run : lost->second.run;
  if (lost != lost_.end()) lost_.erase(lost);
  return evicted_[job];
}

bool Tenants::first_notice(const JobName& job, std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  const auto tenant = find(job);
  return tenant != nullptr && tenant->noticed.insert(rank).second;
}

std::shared_ptr<Tenants::Tenant> Tenants::find(const JobName& job) const {
  const auto found = tenants_.find(job);
  return found == tenants_.end() ? nullptr : found->second.lock();
}

void Tenants::forget_gone() {
  std::erase_if(tenants_, [](const auto& entry) { return entry.second.expired(); });
  std::erase_if(lost_, [this](const auto& entry) { return !may_come_back(entry.second); });
}

}  // namespace poseidon
