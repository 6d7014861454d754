// Tenants: the jobs that the cores of one server have in common.
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
#include "poseidon/options.h"

namespace poseidon {

/// A job's name counts only together with the secret that its connections have proved (Flow::key_id): jobs of one name
/// under different secrets have nothing to do with each other, and nobody learns of another secret's jobs.
struct JobName {
  std::string key_id;
  std::string name;
  // clang-tidy 14 takes the 0 of a comparison for a pointer.
  auto operator<=>(const JobName&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// Limits how many jobs there are, what each holds on all cores together, and what all of them hold. Thread-safe.
class Tenants {
 public:
  explicit Tenants(const Options& options)
      : max_jobs_(options.max_jobs),
        memory_limit_(options.memory_limit),
        server_memory_(std::make_shared<MemoryBudget>(options.server_memory)) {}

  /// What the job may hold: the same for every core, as long as one of them keeps it. Null: there are max_jobs others
  /// with this secret.
  std::shared_ptr<MemoryBudget> admit(const JobName& job);

  /// Whether nobody has asked this of the job's rank before, since the job has been here. For what is told once.
  bool first_notice(const JobName& job, std::uint32_t rank);

 private:
  struct Tenant {
    Tenant(std::size_t memory_limit, std::shared_ptr<MemoryBudget> whole) : budget(memory_limit, std::move(whole)) {}
    MemoryBudget budget;
    std::set<std::uint32_t> noticed;  // ranks; under mutex_
  };
  const int max_jobs_;
  const std::size_t memory_limit_;
  const std::shared_ptr<MemoryBudget> server_memory_;
  std::mutex mutex_;
  std::map<JobName, std::weak_ptr<Tenant>> tenants_;
};

}  // namespace poseidon
