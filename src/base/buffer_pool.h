// BufferPool: keeps buffers between steps, so that steady training allocates nothing and touches
// no new pages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer.h"

namespace poseidon {

/// Not thread-safe: it belongs to one loop. Sizes repeat from step to step, so free buffers are
/// kept by exact size. Held by shared_ptr: a shared buffer may outlive its pool's owner.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  Buffer take(std::size_t size_bytes) {
    auto found = free_.find(size_bytes);
    if (found == free_.end() || found->second.empty()) return Buffer(size_bytes);
    Buffer buffer = std::move(found->second.back());
    found->second.pop_back();
    return buffer;
  }

  void give_back(Buffer buffer) {
    if (buffer) free_[buffer.size()].push_back(std::move(buffer));
  }

  /// A buffer that returns here when its last owner lets go (on the pool's loop).
  std::shared_ptr<Buffer> take_shared(std::size_t size_bytes) { return share(take(size_bytes)); }

  /// The same for a buffer that was taken before.
  std::shared_ptr<Buffer> share(Buffer buffer) {
    auto lease = std::make_shared<Lease>(shared_from_this(), std::move(buffer));
    return {lease, &lease->buffer};
  }

 private:
  struct Lease {
    std::shared_ptr<BufferPool> pool;
    Buffer buffer;
    Lease(std::shared_ptr<BufferPool> from, Buffer taken) : pool(std::move(from)), buffer(std::move(taken)) {}
    ~Lease() { pool->give_back(std::move(buffer)); }
  };
  std::map<std::size_t, std::vector<Buffer>> free_;
};

}  // namespace poseidon
