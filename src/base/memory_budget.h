// MemoryBudget: limits how much memory one owner may hold on all its loops together, such as a job on a server.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/invariant.h"

namespace poseidon {

/// Thread-safe. Everything that is charged must be released.
class MemoryBudget {
 public:
  /// A `limit_bytes` of 0 means no limit. What is charged here is also charged to `whole`, if there is one.
  explicit MemoryBudget(std::size_t limit_bytes, std::shared_ptr<MemoryBudget> whole = nullptr)
      : limit_bytes_(limit_bytes), whole_(std::move(whole)) {}

  std::size_t limit_bytes() const { return limit_bytes_; }
  std::size_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  const MemoryBudget* whole() const { return whole_.get(); }

  /// The lower one of its own limit and the limit of the whole; 0: there is no limit.
  std::size_t lowest_limit_bytes() const {
    const std::size_t whole_bytes = whole_ ? whole_->lowest_limit_bytes() : 0;
    return limit_bytes_ == 0 || whole_bytes == 0 ? std::max(limit_bytes_, whole_bytes)
                                                 : std::min(limit_bytes_, whole_bytes);
  }
  bool has_room(std::size_t size_bytes) const {
    return fits(used_bytes(), size_bytes) && (!whole_ || whole_->has_room(size_bytes));
  }
  /// Charges if there is room. Otherwise it charges nothing and returns false.
  bool try_charge(std::size_t size_bytes) {
    std::size_t used = used_bytes();
    do {
      if (!fits(used, size_bytes)) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + size_bytes, std::memory_order_relaxed));
    if (!whole_ || whole_->try_charge(size_bytes)) return true;
    used_bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
    return false;
  }
  /// Charges even above the limit, for what can no longer be refused.
  void charge(std::size_t size_bytes) {
    used_bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
    if (whole_) whole_->charge(size_bytes);
  }
  void release(std::size_t size_bytes) {
    const std::size_t before = used_bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
    invariant(size_bytes <= before, "a budget releases no more than was charged to it");
    if (whole_) whole_->release(size_bytes);
  }

 private:
  bool fits(std::size_t used, std::size_t more) const {
    return limit_bytes_ == 0 || (used <= limit_bytes_ && more <= limit_bytes_ - used);
  }

  const std::size_t limit_bytes_;
  const std::shared_ptr<MemoryBudget> whole_;
  std::atomic<std::size_t> used_bytes_{0};
};

}  // namespace poseidon
