#include "server/core/tenants.h"

#include <algorithm>

namespace poseidon {

std::shared_ptr<Tenant> Tenants::admit(const JobName& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(tenants_, [](const auto& entry) { return entry.second.tenant.expired(); });
  const auto found = tenants_.find(job);
  auto tenant = found != tenants_.end() ? found->second.tenant.lock() : nullptr;
  if (!tenant) {
    const auto count = std::ranges::count_if(tenants_, [&](const auto& e) { return e.first.key_id == job.key_id; });
    if (count >= max_jobs_) return nullptr;
    tenant = std::make_shared<Tenant>(memory_limit_, server_memory_, job_rate_);
    tenants_[job].tenant = tenant;
  }
  return tenant;
}

bool Tenants::first_notice(const JobName& job, std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(job);
  return found != tenants_.end() && !found->second.tenant.expired() && found->second.noticed.insert(rank).second;
}

}  // namespace poseidon
