#include "server/tenants.h"

#include <algorithm>

namespace poseidon {

std::shared_ptr<MemoryBudget> Tenants::admit(const JobName& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(budgets_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = budgets_.find(job); found != budgets_.end())
    if (auto budget = found->second.lock()) return budget;
  const auto count = std::ranges::count_if(budgets_, [&](const auto& e) { return e.first.key_id == job.key_id; });
  if (count >= max_jobs_) return nullptr;
  auto budget = std::make_shared<MemoryBudget>(memory_limit_, server_memory_);
  budgets_[job] = budget;
  return budget;
}

}  // namespace poseidon
