#include "base/executor.h"

#include <memory>
#include <utility>

#include "base/float_mode.h"

namespace poseidon {

Executor::Executor(int thread_count) {
  threads_.reserve(static_cast<std::size_t>(thread_count));
  for (int i = 0; i < thread_count; ++i)
    threads_.emplace_back("", [this] {
      keep_denormals();
      work();
    });
}

Executor::~Executor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Executor::run(std::size_t part_count, std::function<void(std::size_t)> part, std::function<void()> done) {
  struct Job {
    std::atomic<std::size_t> left;
    std::function<void(std::size_t)> part;
    std::function<void()> done;
  };
  auto job = std::make_shared<Job>();
  job->left = part_count;
  job->part = std::move(part);
  job->done = [this, then = std::move(done)] {
    then();
    unfinished_.fetch_sub(1, std::memory_order_acq_rel);
  };
  unfinished_.fetch_add(1, std::memory_order_acq_rel);
  {
    const std::lock_guard lock(mutex_);
    if (part_count == 0) queue_.emplace_back([job] { job->done(); });
    for (std::size_t i = 0; i < part_count; ++i) {
      queue_.emplace_back([job, i] {
        job->part(i);
        if (job->left.fetch_sub(1, std::memory_order_acq_rel) == 1) job->done();
      });
    }
  }
  wake_.notify_all();
}

void Executor::work() {
  for (;;) {
    std::function<void()> next;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    next();
  }
}

}  // namespace poseidon
