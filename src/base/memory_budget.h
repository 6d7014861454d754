// MemoryBudget: how much memory one owner, a job on a server, may hold, whichever of its loops takes it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace poseidon {

/// Thread-safe. What is charged has to be released.
class MemoryBudget {
 public:
  /// 0: no limit. What is charged here is charged to `whole`, too, of which this is a part; null: of none.
  explicit MemoryBudget(std::size_t limit_bytes, std::shared_ptr<MemoryBudget> whole = nullptr)
      : limit_bytes_(limit_bytes), whole_(std::move(whole)) {}

  std::size_t limit_bytes() const { return limit_bytes_; }
  std::size_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  const MemoryBudget* whole() const { return whole_.get(); }

  /// Its own limit or the whole's, whichever is lower; 0: none.
  std::size_t lowest_limit_bytes() const {
    const std::size_t whole_bytes = whole_ ? whole_->lowest_limit_bytes() : 0;
    return limit_bytes_ == 0 || whole_bytes == 0 ? std::max(limit_bytes_, whole_bytes)
                                                 : std::min(limit_bytes_, whole_bytes);
  }
  bool has_room(std::size_t size_bytes) const {
    return fits(used_bytes(), size_bytes) && (!whole_ || whole_->has_room(size_bytes));
  }
  /// False, and nothing is charged, where there is no room.
  bool try_charge(std::size_t size_bytes) {
    std::size_t used = used_bytes();
    do {
      if (!fits(used, size_bytes)) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + size_bytes, std::memory_order_relaxed));
    if (!whole_ || whole_->try_charge(size_bytes)) return true;
    used_bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
    return false;
  }
  /// For what can no longer be refused: may pass the limit.
  void charge(std::size_t size_bytes) {
    used_bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
    if (whole_) whole_->charge(size_bytes);
  }
  void release(std::size_t size_bytes) {
    used_bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
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
