// Executor: a few threads for arithmetic that would take a loop too long (factor products).
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "base/pinned.h"
#include "base/thread.h"

namespace poseidon {

/// Thread-safe. Jobs start in the order in which they were given.
class Executor : private Pinned {
 public:
  explicit Executor(int thread_count);
  /// Finishes the jobs that were given before, then joins the threads.
  ~Executor();

  int thread_count() const { return static_cast<int>(threads_.size()); }

  /// Calls `part(i)` for i in [0, part_count) on the threads, then `done` once, on the thread that
  /// finished the last part. Never blocks.
  void run(std::size_t part_count, std::function<void(std::size_t)> part, std::function<void()> done);

  /// Whether all jobs have ended.
  bool idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

 private:
  void work();

  std::atomic<std::size_t> unfinished_{0};  // jobs
  std::mutex mutex_;
  Condition wake_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::vector<Thread> threads_;
};

}  // namespace poseidon
