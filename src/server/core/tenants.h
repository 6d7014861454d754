// Tenants: the jobs that the cores of one server share.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/memory_budget.h"
#include "poseidon/options.h"
#include "poseidon/status.h"
#include "server/core/rate_limit.h"

namespace poseidon {

/// Identifies a job by its name and by the secret that its connections have proved (Flow::key_id). Jobs of one name
/// under different secrets are separate. Nobody learns of another secret's jobs.
struct JobName {
  std::string key_id;
  std::string name;
  // clang-tidy 14 takes the 0 of a comparison for a pointer.
  auto operator<=>(const JobName&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// One generation of one run of a job.
struct JobRun {
  std::uint32_t generation = 0;
  std::string run;
  /// Whether `other` is the same or a later generation of the same job. Every generation has a run name of its own, and
  /// a job that is started again counts its generations from the beginning.
  bool goes_on_as(const JobRun& other) const { return run == other.run || generation < other.generation; }
};

/// What the workers of an evicted job are told.
std::string evicted_text(const JobName& job);

/// What a job may use on all cores together. Every core of a server gets the same, for as long as one of them keeps it.
struct Allowance {
  std::shared_ptr<MemoryBudget> memory;
  std::shared_ptr<RateLimit> rate;  // null: no limit
};

/// Limits the number of jobs, what each job may use, and the memory that all jobs hold. Thread-safe.
class Tenants {
 public:
  explicit Tenants(const Options& options)
      : max_jobs_(options.max_jobs),
        memory_limit_(options.memory_limit),
        rate_limit_(options.rate_limit),
        server_memory_(std::make_shared<MemoryBudget>(options.server_memory)),
        timeout_(options.timeout) {}

  /// Fails with what `objection` says, or with ErrorCode::refused if there are already max_jobs other jobs with this
  /// secret.
  Result<Allowance> admit(const JobName& job, const JobRun& run);
  /// Why the server's operator does not let this run of a job in: ErrorCode::evicted, or ErrorCode::refused while the
  /// server is being drained. OK if the operator does.
  Status objection(const JobName& job, const JobRun& run) const;

  /// From now on no job enters that is not here. One that has lost a worker may come back within the timeout.
  void drain() { draining_ = true; }
  bool draining() const { return draining_; }
  /// Whether the server is being drained, and its last job has given back all memory and does not come back.
  bool drained();
  /// Notes that a job of so many workers has lost some and has gone from a core. It may come back as its next
  /// generation.
  void note_lost(const JobName& job, const JobRun& run, std::uint32_t worker_count);
  /// A job that may come back.
  struct Lost {
    JobRun run;
    std::uint32_t worker_count = 0;
    Clock::time_point since;
  };
  std::map<JobName, Lost> lost_jobs();
  /// Keeps the job out, also its later generations. It may come back when it is started again. Returns the run that is
  /// here, or that may come back; nothing if there is none.
  std::optional<JobRun> evict(const JobName& job);

  const MemoryBudget& server_memory() const { return *server_memory_; }

  /// Returns true for the first call with this rank since the job has been on this server, and false after that. Use it
  /// for notices that are to be given once.
  bool first_notice(const JobName& job, std::uint32_t rank);

 private:
  struct Tenant {
    Tenant(std::size_t memory_limit, std::shared_ptr<MemoryBudget> whole, std::uint64_t rate_limit)
        : budget(memory_limit, std::move(whole)),
          rate(rate_limit > 0 ? std::make_shared<RateLimit>(rate_limit) : nullptr) {}
    MemoryBudget budget;
    const std::shared_ptr<RateLimit> rate;
    std::set<std::uint32_t> noticed;  // ranks; under mutex_
    JobRun run;                       // the last one that has entered; under mutex_
  };
  Status objection_locked(const JobName& job, const JobRun& run) const;
  bool keeps_out(const JobName& job, const JobRun& run) const;
  bool may_come_back(const Lost& lost) const { return Clock::now() < lost.since + timeout_; }
  std::shared_ptr<Tenant> find(const JobName& job) const;
  void forget_gone();

  const int max_jobs_;
  const std::size_t memory_limit_;
  const std::uint64_t rate_limit_;  // bytes a second; 0: no limit
  const std::shared_ptr<MemoryBudget> server_memory_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> draining_{false};
  mutable std::mutex mutex_;
  std::map<JobName, std::weak_ptr<Tenant>> tenants_;
  std::map<JobName, Lost> lost_;
  std::map<JobName, JobRun> evicted_;
};

}  // namespace poseidon
