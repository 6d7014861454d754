#include "server/core/tenants.h"

#include <algorithm>

namespace poseidon {

std::shared_ptr<MemoryBudget> Tenants::admit(const JobName& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(tenants_, [](const auto& entry) { return entry.second.expired(); });
  const auto found = tenants_.find(job);
  auto tenant = found != tenants_.end() ? found->second.lock() : nullptr;
  if (!tenant) {
    const auto count = std::ranges::count_if(tenants_, [&](const auto& e) { return e.first.key_id == job.key_id; });
    if (count >= max_jobs_) return nullptr;
    tenant = std::make_shared<Tenant>(memory_limit_, server_memory_);
    tenants_[job] = tenant;
  }
  return {tenant, &tenant->budget};
}

bool Tenants::first_notice(const JobName& job, std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(job);
  const auto tenant = found != tenants_.end() ? found->second.lock() : nullptr;
  return tenant != nullptr && tenant->noticed.insert(rank).second;
}

}  // namespace poseidon
