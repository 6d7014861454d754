// LoopGate: posts to a loop for as long as that loop runs.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "transport/loop.h"

namespace poseidon::spread {

/// Other loops may still have something for a loop that ends. The gate closes with the loop.
class LoopGate {
 public:
  /// Any thread. The gate is open when the loop has run this task.
  static std::shared_ptr<LoopGate> of(Loop& loop) {
    auto gate = std::make_shared<LoopGate>(loop);
    loop.post([gate] {
      // The loop drops this timer, and with it the guard, when it ends.
      const std::shared_ptr<void> guard(nullptr, [gate](void*) { gate->close(); });
      gate->loop_->call_at(Clock::time_point::max(), [guard] {});
    });
    return gate;
  }
  explicit LoopGate(Loop& loop) : loop_(&loop) {}

  /// Whether the loop has ended. Any thread.
  bool closed() {
    const std::lock_guard lock(mutex_);
    return loop_ == nullptr;
  }

  /// Runs `task` on the loop. Returns false if the loop has ended. Any thread.
  bool post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (loop_ == nullptr) return false;
    loop_->post(std::move(task));
    return true;
  }

 private:
  void close() {
    const std::lock_guard lock(mutex_);
    loop_ = nullptr;
  }

  std::mutex mutex_;
  Loop* loop_;  // guarded by mutex_; null: it has ended
};

}  // namespace poseidon::spread
