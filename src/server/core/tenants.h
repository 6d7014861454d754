// Tenants: the jobs that the cores of one server share.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/memory_budget.h"
#include "base/rate_limit.h"
#include "poseidon/options.h"

namespace poseidon {

/// Identifies a job by its name and by the secret that its connections have proved (Flow::key_id). Jobs of one name
/// under different secrets are separate. Nobody learns of another secret's jobs.
struct JobName {
  std::string key_id;
  std::string name;
  // clang-tidy 14 takes the 0 of a comparison for a pointer.
  auto operator<=>(const JobName&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// What all cores of a server count of one job together. Thread-safe.
struct Tenant {
  Tenant(std::size_t memory_limit, std::shared_ptr<MemoryBudget> whole, std::uint64_t job_rate)
      : memory(memory_limit, std::move(whole)), incoming(job_rate), outgoing(job_rate) {}
  MemoryBudget memory;
  RateLimit incoming, outgoing;
};

/// Limits the number of jobs, the memory and the rate of each job on all cores together, and the memory that all jobs
/// hold. Thread-safe.
class Tenants {
 public:
  explicit Tenants(const Options& options)
      : max_jobs_(options.max_jobs),
        memory_limit_(options.memory_limit),
        job_rate_(options.job_rate),
        server_memory_(std::make_shared<MemoryBudget>(options.server_memory)) {}

  /// Returns the job's account. Every core gets the same one for as long as one of them keeps it. Returns null if there
  /// are already max_jobs other jobs with this secret.
  std::shared_ptr<Tenant> admit(const JobName& job);

  /// Returns true for the first call with this rank since the job has been on this server, and false after that. Use it
  /// for notices that are to be given once.
  bool first_notice(const JobName& job, std::uint32_t rank);

 private:
  struct Entry {
    std::weak_ptr<Tenant> tenant;
    std::set<std::uint32_t> noticed;  // ranks
  };
  const int max_jobs_;
  const std::size_t memory_limit_;
  const std::uint64_t job_rate_;
  const std::shared_ptr<MemoryBudget> server_memory_;
  std::mutex mutex_;
  std::map<JobName, Entry> tenants_;  // under mutex_
};

}  // namespace poseidon
