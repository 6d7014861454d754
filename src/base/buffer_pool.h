// BufferPool: keeps buffers between steps, so that steady training allocates nothing and touches
// no new pages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/memory_budget.h"

namespace poseidon {

/// Not thread-safe: it belongs to one loop. Sizes repeat from step to step, so free buffers are
/// kept by exact size. Held by shared_ptr: a shared buffer may outlive its pool's owner. What is taken comes back.
///
/// All memory of a pool, in use or free, is charged to its budget; where that is used up, free buffers go first.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(0))
      : budget_(std::move(budget)) {}
  ~BufferPool() { budget_->release(charged_bytes_); }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// For sizes that have been checked: does not ask the budget.
  Buffer take(std::size_t size_bytes) {
    if (Buffer buffer = take_free(size_bytes)) return buffer;
    Buffer buffer(size_bytes);
    charge(size_bytes);
    return buffer;
  }

  /// For sizes that others ask for: empty where the budget or the machine has no room.
  Buffer try_take(std::size_t size_bytes) {
    if (Buffer buffer = take_free(size_bytes)) return buffer;
    if (!try_charge(size_bytes)) return {};
    Buffer buffer = Buffer::try_make(size_bytes);
    if (!buffer) release(size_bytes);
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

  const MemoryBudget& budget() const { return *budget_; }
  /// Whether the budget has room for so much more.
  bool has_room(std::size_t size_bytes) {
    if (budget_->has_room(size_bytes)) return true;
    drop_free();
    return budget_->has_room(size_bytes);
  }
  /// Memory that its owner holds elsewhere counts, too.
  bool try_charge(std::size_t size_bytes) {
    if (!budget_->try_charge(size_bytes)) {
      drop_free();
      if (!budget_->try_charge(size_bytes)) return false;
    }
    charged_bytes_ += size_bytes;
    return true;
  }
  void charge(std::size_t size_bytes) {
    budget_->charge(size_bytes);
    charged_bytes_ += size_bytes;
  }
  void release(std::size_t size_bytes) {
    budget_->release(size_bytes);
    charged_bytes_ -= size_bytes;
  }

 private:
  struct Lease {
    std::shared_ptr<BufferPool> pool;
    Buffer buffer;
    Lease(std::shared_ptr<BufferPool> from, Buffer taken) : pool(std::move(from)), buffer(std::move(taken)) {}
    ~Lease() { pool->give_back(std::move(buffer)); }
  };

  /// Empty where no free buffer has the size.
  Buffer take_free(std::size_t size_bytes) {
    const auto found = free_.find(size_bytes);
    if (found == free_.end() || found->second.empty()) return {};
    Buffer buffer = std::move(found->second.back());
    found->second.pop_back();
    return buffer;
  }

  void drop_free() {
    for (const auto& [size_bytes, buffers] : std::exchange(free_, {})) release(size_bytes * buffers.size());
  }

  const std::shared_ptr<MemoryBudget> budget_;
  std::size_t charged_bytes_ = 0;  // by this pool, to be released with it
  std::map<std::size_t, std::vector<Buffer>> free_;
};

}  // namespace poseidon
