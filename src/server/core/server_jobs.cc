// What a ServerCore tells its operator of its jobs, and how it ends one of them.
#include <algorithm>
#include <utility>

#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

CoreJobReport ServerCore::report_of(const Job& job) {
  const MemoryBudget& budget = job.shard.budget();
  CoreJobReport core{job.name, {}, {}, job.began_ns, job.last_progress_ns};
  JobReport& report = core.report;
  report.name = job.name.name;
  report.generation = job.generation;
  report.worker_count = job.worker_count;
  report.memory_bytes = budget.used_bytes();
  report.memory_limit_bytes = budget.limit_bytes();
  report.open_chunk_count = job.shard.open_chunk_count();
  if (job.shard_of_hosts) report.open_chunk_count += job.shard_of_hosts->open_chunk_count();
  report += job.closed_traffic;
  for (Connection* connection : job.connections) {
    core.connected_ranks.insert(connection->rank);
    core.last_progress_ns = std::max(core.last_progress_ns, connection->last_progress_ns);
    report += connection->flow().traffic();
  }
  return core;
}

std::vector<CoreJobReport> ServerCore::jobs() {
  loop_->check_other_thread();
  return loop_->call([this] {
    std::vector<CoreJobReport> reports;
    for (const auto& [name, job] : jobs_) reports.push_back(report_of(*job));
    return reports;
  });
}

bool ServerCore::has_values_for_others() {
  loop_->check_other_thread();
  const auto stays = [](const Connection* one) { return !one->left; };
  return loop_->call([&] {
    return std::ranges::any_of(jobs_, [&](const auto& job) {
      return job.second->shard_of_values().has_values() && std::ranges::any_of(job.second->connections, stays);
    });
  });
}

void ServerCore::evict(const JobName& job, const JobRun& run, const Status& why) {
  loop_->check_other_thread();
  loop_->call([&] {
    const auto found = jobs_.find(job);
    if (found == jobs_.end() || !run.goes_on_as({found->second->generation, found->second->run})) return;
    auto evicted = std::move(found->second);
    jobs_.erase(found);
    end_generation(std::move(evicted), why);
  });
}

}  // namespace poseidon
