// What a server tells its operator of its jobs, and how it ends one of them: over all cores.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "server/server_impl.h"

namespace poseidon {

namespace {

double seconds_since(std::int64_t then_ns) { return static_cast<double>(now_ns() - then_ns) / 1e9; }

/// A core that is still in an earlier generation of the job than another adds nothing: that generation is over.
void add(CoreJobReport& all, CoreJobReport one) {
  if (one.report.generation < all.report.generation) return;
  if (one.report.generation > all.report.generation) {
    all = std::move(one);
    return;
  }
  all.report += one.report;
  all.report.open_chunk_count += one.report.open_chunk_count;
  all.connected_ranks.merge(one.connected_ranks);
  all.began_ns = std::min(all.began_ns, one.began_ns);
  all.last_progress_ns = std::max(all.last_progress_ns, one.last_progress_ns);
}

}  // namespace

std::size_t ServerImpl::secret_of(const JobName& job) const {
  const auto found = std::ranges::find(key_ids_, job.key_id);
  return found == key_ids_.end() ? 0 : static_cast<std::size_t>(found - key_ids_.begin()) + 1;
}

ServerReport ServerImpl::report() {
  std::map<JobName, CoreJobReport> jobs;
  for (auto& core : cores_) {
    for (CoreJobReport& one : core->jobs())
      if (const auto [place, is_new] = jobs.try_emplace(one.name, one); !is_new) add(place->second, std::move(one));
  }
  ServerReport report;
  for (auto& [name, job] : jobs) {
    job.report.secret = secret_of(name);
    job.report.connected_count = static_cast<std::uint32_t>(job.connected_ranks.size());
    job.report.age_s = seconds_since(job.began_ns);
    job.report.silent_s = seconds_since(job.last_progress_ns);
    report.jobs.push_back(std::move(job.report));
  }
  for (const auto& [name, lost] : tenants_->lost_jobs()) {
    if (jobs.contains(name)) continue;  // it has come back, or some core has it still
    JobReport job;
    job.name = name.name;
    job.secret = secret_of(name);
    job.lost = true;
    job.generation = lost.run.generation;
    job.worker_count = lost.worker_count;
    job.silent_s = std::chrono::duration<double>(Clock::now() - lost.since).count();
    report.jobs.push_back(std::move(job));
  }
  std::ranges::sort(report.jobs, {}, [](const JobReport& job) { return std::tie(job.secret, job.name); });
  static_cast<TrafficStats&>(report) = traffic();
  report.memory_bytes = tenants_->server_memory().used_bytes();
  report.memory_limit_bytes = tenants_->server_memory().limit_bytes();
  return report;
}

bool ServerImpl::evict(const std::string& job, std::size_t secret) {
  if (secret > key_ids_.size() || (secret == 0 && !key_ids_.empty())) return false;
  const JobName name{secret == 0 ? "" : key_ids_[secret - 1], job};
  const auto run = tenants_->evict(name);  // first, so that no worker comes back to a core that has let it go
  if (!run) return false;
  for (auto& core : cores_) core->evict(name, *run, {ErrorCode::evicted, evicted_text(name)});
  return true;
}

}  // namespace poseidon
