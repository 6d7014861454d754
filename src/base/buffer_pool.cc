#include "base/buffer_pool.h"

namespace poseidon {

Buffer BufferPool::take_free(std::size_t size_bytes) {
  auto found = free_.lower_bound(size_bytes);
  const std::size_t most_bytes = size_bytes + size_bytes / 4;
  while (found != free_.end() && found->second.buffers.empty() && found->first <= most_bytes) ++found;
  if (found == free_.end() || found->second.buffers.empty() || found->first > most_bytes) return {};
  Buffer buffer = std::move(found->second.buffers.back());
  found->second.buffers.pop_back();
  buffer.resize(size_bytes);
  free_bytes_ -= buffer.capacity_bytes();
  use(buffer.capacity_bytes());
  return buffer;
}

void BufferPool::drop_free() {
  free_.clear();
  free_bytes_ = 0;
  trim();
}

void BufferPool::drop_oldest() {
  std::erase_if(free_, [](const auto& one) { return one.second.buffers.empty(); });
  while (free_bytes_ > most_free_bytes()) {
    const auto oldest = std::ranges::min_element(free_, {}, [](const auto& one) { return one.second.last_use; });
    free_bytes_ -= oldest->first;
    oldest->second.buffers.pop_back();
    if (oldest->second.buffers.empty()) free_.erase(oldest);
  }
  trim();
}

}  // namespace poseidon
