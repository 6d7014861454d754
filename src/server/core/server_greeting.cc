// Decides which connections a server core accepts, and to which run and generation of which job they belong.
#include <sys/resource.h>

#include <algorithm>
#include <string>
#include <utility>

#include "poseidon/features.h"
#include "server/core/connection.h"
#include "server/core/server_core.h"
#include "transport/traffic_class.h"

namespace poseidon {

namespace {

constexpr const char* kNameJobs = "; give jobs that run at the same time different names (--job NAME or POSEIDON_JOB)";

/// Returns how many connections one job may have to one core. Together they are half of what this process may open, so
/// that others can connect.
std::size_t most_connections(std::size_t core_count) {
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  return descriptors.rlim_cur / 2 / core_count;
}

JobRun run_of(const wire::Hello& hello) { return {hello.generation, hello.run}; }

Status refused(std::string why) { return why.empty() ? Status() : Status(ErrorCode::refused, std::move(why)); }

}  // namespace

/// The text names no job but the one of the hello, and tells nothing about it to peers without its secret.
Status ServerCore::objection(const JobName& name, const wire::Hello& hello) const {
  if (!wire::is_job_name(hello.job) || !hello.other_cores.empty())
    return refused(concat("the name of a job must be 1 to ", wire::kMaxJobNameBytes,
                          " bytes of UTF-8 without control characters"));
  if (hello.run.size() > wire::kMaxRunBytes)
    return refused(concat("the name of a run has at most ", wire::kMaxRunBytes, " bytes"));
  const std::string of_job = " of job '" + hello.job + "'";
  if (embedded() && hello.job != options_.job)
    return refused("this server takes no part" + of_job +
                   "; end what still runs of an earlier job, or give this one another MASTER_PORT");
  const auto found = jobs_.find(name);
  const Job* job = found == jobs_.end() ? nullptr : found->second.get();
  const std::uint32_t generation = job != nullptr ? job->generation : embedded() ? options_.generation : 0;
  if (hello.generation < generation)
    return refused(
        concat("generation ", hello.generation, of_job, " has ended, this is generation ", generation,
               "; the process has been replaced: end it, or the earlier run of the job that is still connected"));
  if (job != nullptr && std::ranges::find(job->earlier_runs, hello.run) != job->earlier_runs.end())
    return refused("another run" + of_job + " has replaced this one" + kNameJobs);
  if (Status why = surroundings_.tenants->objection(name, run_of(hello)); !why.ok()) return why;
  if (job != nullptr && job->ends_with(hello, !embedded())) job = nullptr;
  const auto most = embedded() ? static_cast<std::uint32_t>(options_.world_size) : limits::kWorkers;
  const bool all = embedded() && options_.on_failure != OnFailure::shrink;
  const std::uint32_t expected = job != nullptr ? job->worker_count : all ? most : hello.worker_count;
  if (hello.worker_count != expected || hello.rank >= expected || expected > most)
    return refused(concat("this server serves ", std::min(expected, most), " workers", of_job, ", not rank ",
                          hello.rank, " of ", hello.worker_count, "; give all ranks the same WORLD_SIZE"));
  if (job != nullptr && !embedded() && job->connections.size() >= most_connections(surroundings_.core_count))
    return refused(concat(
        "the job has ", job->connections.size(),
        " connections to a core of this server, which is the limit: half of the descriptors that its process may "
        "open; raise its `ulimit -n`"));
  if (const auto& host = hello.host; host && (host->count < 2 || host->count >= expected || host->index >= host->count))
    return refused(concat("a machine ", host->index, " of ", host->count, " does not fit ", expected, " workers"));
  if (std::string why = pace_objection(job, hello); !why.empty()) return refused(std::move(why));
  return refused(job != nullptr ? job->objection(hello) : "");
}

/// Says why this server cannot do what the job's options ask for. `job` is null before the job is known here.
std::string ServerCore::pace_objection(const Job* job, const wire::Hello& hello) const {
  const std::string rank = concat("rank ", hello.rank);
  if (!hello.pace)
    return rank + " asks for a treatment of stragglers that this server does not know; install the same poseidon-dl";
  if (job != nullptr && job->pace != *hello.pace)
    return rank + " has other options than the job's other ranks: give all the same stragglers, straggler_factor, " +
           "straggler_steps, consistency and staleness";
  FeatureSet features(options_);
  features.add(wire::features_of(*hello.pace));
  if (hello.host) features.add(Feature::sums_of_machines);
  if (Status why = features.check(); !why.ok()) return "of this server's options and the job's, " + why.message();
  return "";
}

Result<ServerCore::Job*> ServerCore::job_of(const JobName& name, const wire::Hello& hello) {
  auto found = jobs_.find(name);
  std::vector<std::string> earlier_runs;
  if (found != jobs_.end() && found->second->ends_with(hello, !embedded())) {
    earlier_runs = found->second->earlier_runs;
    if (found->second->run != hello.run) earlier_runs.push_back(found->second->run);
    if (earlier_runs.size() > limits::kEarlierRuns) earlier_runs.erase(earlier_runs.begin());
    const Status why = replaced_by(hello, *found->second);
    end_generation(std::move(found->second), why);
    jobs_.erase(found);
    found = jobs_.end();
  }
  if (found != jobs_.end()) return found->second.get();
  auto allowance = surroundings_.tenants->admit(name, run_of(hello));
  if (!allowance.ok()) return allowance.status();
  auto job = std::make_unique<Job>(name, hello, Reduction{options_.aggregation, options_.reduce_order},
                                   ShardThreads{loop_.get(), surroundings_.wide}, std::move(allowance.value()));
  job->earlier_runs = std::move(earlier_runs);
  job->shard.set_pace(job->pace, loop_.get(), [this, name](std::uint32_t rank, const std::string& text) {
    if (surroundings_.on_late_rank) surroundings_.on_late_rank(name, rank, text);
  });
  if (surroundings_.checkpoints != nullptr) {
    Shard& keeper = job->shard_of_values();
    keeper.set_checkpoint(std::make_unique<ShardCheckpoint>(*surroundings_.checkpoints,
                                                            checkpoint_job(name.name, name.key_id), options_, *loop_,
                                                            keeper.pool().shared_from_this()));
  }
  return jobs_.emplace(name, std::move(job)).first->second.get();
}

/// Says that the job has gone on to its next generation or has been started again.
Status ServerCore::replaced_by(const wire::Hello& next, const Job& job) {
  const std::string of_job = " of job '" + job.name.name + "' has ";
  return {ErrorCode::aborted,
          job.generation < next.generation
              ? concat("generation ", job.generation, of_job, "been replaced by generation ", next.generation)
              : "another run" + of_job + "replaced this one" + kNameJobs};
}

/// Ends a generation. It tells the workers that are still connected and closes their connections. Until these are
/// closed, the transport may write to the shard's memory.
void ServerCore::end_generation(std::unique_ptr<Job> job, const Status& why) {
  for (Connection* connection : job->connections) {
    connection->left = true;
    connection->send_text(wire::Abort{why}.make(), [] {});
    connection->flow().close(kLinger);
  }
  if (handover_ != nullptr) handover_->drop_guests(job->name, job->shard);
  job->guests = 0;
  if (!job->connections.empty()) replaced_jobs_.push_back(std::move(job));
}

}  // namespace poseidon
