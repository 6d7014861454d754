// BufferPool: keeps buffers between steps, so that steady training allocates nothing and touches
// no new pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/invariant.h"
#include "base/memory_budget.h"
#include "base/one_thread.h"
#include "base/pinned.h"

namespace poseidon {

/// Not thread-safe: it belongs to one loop. It is held by shared_ptr, because a shared buffer may outlive the owner of
/// its pool. Every buffer that is taken must be given back.
///
/// Most sizes repeat from step to step, but those of factors vary with the batch. So a free buffer also serves a
/// request that is at most a fifth smaller. Free buffers together have at most twice the bytes that were in use at
/// once, or kLeastFreeBytes if that is more. Those that have not been used for the longest time are freed first.
///
/// All memory of a pool, in use or free, is charged to its budget. If the budget is used up, free buffers are freed.
///
/// Some buffers are kept for a long time, such as results for late workers. They must fit in the budget beside the most
/// that all others have needed at once. `try_keep` says whether they do.
class BufferPool : public std::enable_shared_from_this<BufferPool>, private Pinned {
 public:
  static constexpr std::size_t kLeastFreeBytes = std::size_t{64} << 20;

  explicit BufferPool(std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(0))
      : budget_(std::move(budget)) {}
  ~BufferPool() { budget_->release(charged_bytes_); }

  /// Takes a buffer and charges it, even above the budget's limit. For sizes that have been checked before.
  Buffer take(std::size_t size_bytes) {
    one_thread_.check();
    if (Buffer buffer = take_free(size_bytes)) return buffer;
    Buffer buffer(size_bytes);
    charge(size_bytes);
    return buffer;
  }

  /// Takes a buffer, or an empty one if the budget or the machine has no room. For sizes that a peer asks for.
  Buffer try_take(std::size_t size_bytes) {
    one_thread_.check();
    if (Buffer buffer = take_free(size_bytes)) return buffer;
    if (!try_charge(size_bytes)) return {};
    Buffer buffer = Buffer::try_make(size_bytes);
    if (!buffer) release(size_bytes);
    return buffer;
  }

  void give_back(Buffer buffer) {
    one_thread_.check();
    if (!buffer) return;
    const std::size_t capacity_bytes = buffer.capacity_bytes();
    invariant(capacity_bytes <= used_bytes_, "a buffer goes back once, to the pool from which it was taken");
    used_bytes_ -= capacity_bytes;
    free_bytes_ += capacity_bytes;
    FreeBuffers& same = free_[capacity_bytes];
    same.last_use = ++uses_;
    same.buffers.push_back(std::move(buffer));
    if (free_bytes_ > most_free_bytes()) drop_oldest();
  }

  /// A buffer that returns here when its last owner lets go (on the pool's loop).
  std::shared_ptr<Buffer> take_shared(std::size_t size_bytes) { return share(take(size_bytes)); }

  /// The same, for a buffer that was taken before.
  std::shared_ptr<Buffer> share(Buffer buffer) {
    one_thread_.check();
    auto lease = std::make_shared<Lease>(shared_from_this(), std::move(buffer));
    return {lease, &lease->buffer};
  }

  const MemoryBudget& budget() const { return *budget_; }
  /// Bytes of the free buffers.
  std::size_t free_bytes() const { return one_thread_.checked(free_bytes_); }
  /// Whether the budget has room for that much more. Frees the free buffers if it has not.
  bool has_room(std::size_t size_bytes) {
    one_thread_.check();
    if (!fits(size_bytes)) {
      drop_free();
      if (!fits(size_bytes)) return false;
    }
    note_need(size_bytes);
    return true;
  }
  /// The same, without freeing anything.
  bool could_hold(std::size_t size_bytes) const {
    return one_thread_.checked(budget_)->has_room(size_bytes - std::min(size_bytes, charged_bytes_ - used_bytes_));
  }
  /// Charges memory that the pool's owner holds elsewhere. False, and nothing is charged, if there is no room.
  bool try_charge(std::size_t size_bytes) {
    one_thread_.check();
    if (!try_cover(size_bytes)) {
      drop_free();
      if (!try_cover(size_bytes)) return false;
    }
    use(size_bytes);
    return true;
  }
  void charge(std::size_t size_bytes) {
    one_thread_.check();
    const std::size_t missing_bytes = missing_for(size_bytes);
    budget_->charge(missing_bytes);
    charged_bytes_ += missing_bytes;
    use(size_bytes);
  }
  void release(std::size_t size_bytes) {
    one_thread_.check();
    invariant(size_bytes <= used_bytes_, "a pool releases no more than it has charged");
    used_bytes_ -= size_bytes;
    trim();
  }

  /// Notes that this much of what is taken stays until `end_keep`. Charges at once the memory that everything else has
  /// ever needed at once. False, and nothing is charged, if the budget has no room for that.
  bool try_keep(std::size_t size_bytes) {
    one_thread_.check();
    const std::size_t bytes = most_needed_bytes_ + kept_bytes_ + size_bytes;
    if (bytes > charged_bytes_) {
      if (!budget_->try_charge(bytes - charged_bytes_)) return false;
      charged_bytes_ = bytes;
    }
    kept_bytes_ += size_bytes;
    return true;
  }
  /// Notes that kept memory is no longer in use.
  void end_keep(std::size_t size_bytes) {
    one_thread_.check();
    invariant(size_bytes <= kept_bytes_, "a pool ends the keeping of no more than it keeps");
    kept_bytes_ -= size_bytes;
    trim();
  }

 private:
  struct Lease {
    std::shared_ptr<BufferPool> pool;
    Buffer buffer;
    Lease(std::shared_ptr<BufferPool> from, Buffer taken) : pool(std::move(from)), buffer(std::move(taken)) {}
    ~Lease() { pool->give_back(std::move(buffer)); }
  };

  /// Free buffers of one capacity.
  struct FreeBuffers {
    std::vector<Buffer> buffers;
    std::uint64_t last_use = 0;  // by `uses_`
  };

  /// Returns an empty buffer if no free one serves the size.
  Buffer take_free(std::size_t size_bytes);
  void drop_free();
  std::size_t most_free_bytes() const { return std::max(2 * most_used_bytes_, kLeastFreeBytes); }
  void drop_oldest();

  /// The bytes that would have to be charged for that much more.
  std::size_t missing_for(std::size_t size_bytes) const {
    const std::size_t uncommitted_bytes = charged_bytes_ - used_bytes_ - free_bytes_;
    return size_bytes - std::min(size_bytes, uncommitted_bytes);
  }
  bool fits(std::size_t size_bytes) const { return budget_->has_room(missing_for(size_bytes)); }
  bool try_cover(std::size_t size_bytes) {
    const std::size_t missing_bytes = missing_for(size_bytes);
    if (!budget_->try_charge(missing_bytes)) return false;
    charged_bytes_ += missing_bytes;
    return true;
  }
  void use(std::size_t size_bytes) {
    used_bytes_ += size_bytes;
    most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
    note_need(0);
  }
  void note_need(std::size_t more_bytes) {
    const std::size_t needed_bytes = used_bytes_ - std::min(used_bytes_, kept_bytes_) + more_bytes;
    most_needed_bytes_ = std::max(most_needed_bytes_, needed_bytes);
  }
  /// Releases what is charged beyond the buffers that exist and the reserve beside kept ones.
  void trim() {
    std::size_t bytes = used_bytes_ + free_bytes_;
    if (kept_bytes_ > 0) bytes = std::max(bytes, most_needed_bytes_ + kept_bytes_);
    if (charged_bytes_ <= bytes) return;
    budget_->release(charged_bytes_ - bytes);
    charged_bytes_ = bytes;
  }

  const std::shared_ptr<MemoryBudget> budget_;
  std::size_t charged_bytes_ = 0;  // charged by this pool: at least what is used and free
  std::size_t used_bytes_ = 0;
  std::size_t free_bytes_ = 0;
  std::size_t kept_bytes_ = 0;               // part of used_bytes_
  std::size_t most_needed_bytes_ = 0;        // the most that was used at once, or asked for, beside the kept bytes
  std::size_t most_used_bytes_ = 0;          // the most that was used at once
  std::map<std::size_t, FreeBuffers> free_;  // by capacity
  std::uint64_t uses_ = 0;
  [[no_unique_address]] OneThread one_thread_{"BufferPool"};
};

}  // namespace poseidon
