#include "server/core/port_queue.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <utility>
#include <vector>

namespace poseidon {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr double kRate = 1e6;

/// Jobs that ask for the next message as soon as one has gone.
class Port {
 public:
  void add_job(int connections, std::size_t message_bytes) {
    jobs_.emplace_back(message_bytes);
    for (int connection = 0; connection < connections; ++connection) ask(jobs_.size() - 1);
  }
  void stop(std::size_t job) { jobs_[job].stopped = true; }
  void run(double seconds) {
    const auto end_ns = time_ns_ + static_cast<std::int64_t>(seconds * kSecond);
    for (; time_ns_ < end_ns; time_ns_ += kSecond / 1000) {
      queue_.run(time_ns_);
      for (auto& again = again_; !again.empty();) {
        const std::size_t job = again.back();
        again.pop_back();
        ask(job);
      }
    }
  }
  double taken(std::size_t job) { return std::exchange(jobs_[job].bytes, 0.0); }

 private:
  struct Job {
    explicit Job(std::size_t size_bytes) : message_bytes(size_bytes) {}
    std::size_t message_bytes;
    double bytes = 0;
    bool stopped = false;
    PortQueue::Account account;
  };
  void ask(std::size_t index) {
    Job& job = jobs_[index];
    if (job.stopped) return;
    const auto go = [this, index] {
      jobs_[index].bytes += static_cast<double>(jobs_[index].message_bytes);
      again_.push_back(index);
    };
    if (queue_.ask(job.account, job.message_bytes, time_ns_, go)) go();
  }

  PortQueue queue_{kRate};
  std::int64_t time_ns_ = kSecond;
  std::deque<Job> jobs_;
  std::vector<std::size_t> again_;
};

TEST(PortQueue, SharesByJobAndNotByConnectionOrMessage) {
  Port port;
  port.add_job(1, 1000);
  port.add_job(16, 1000);
  port.add_job(4, 8000);
  port.run(10);
  for (std::size_t job = 0; job < 3; ++job) EXPECT_NEAR(port.taken(job), 10 * kRate / 3, 0.01 * 10 * kRate / 3) << job;
}

TEST(PortQueue, WhatOneJobDoesNotUseTheOthersGet) {
  Port port;
  port.add_job(2, 1000);
  port.add_job(2, 1000);
  port.run(1);
  port.stop(0);
  port.run(1);
  port.taken(1);
  port.run(1);
  EXPECT_NEAR(port.taken(1), kRate, 0.01 * kRate);
}

TEST(PortQueue, WhoHasPausedHasNoClaimToTheTimeBefore) {
  Port port;
  port.add_job(2, 1000);
  port.run(10);
  port.taken(0);
  port.add_job(2, 1000);
  port.run(1);
  EXPECT_NEAR(port.taken(0), kRate / 2, 0.02 * kRate);
  EXPECT_NEAR(port.taken(1), kRate / 2, 0.02 * kRate);
}

TEST(PortQueue, WithoutARateAllGoAtOnce) {
  PortQueue queue(0);
  PortQueue::Account job;
  for (int message = 0; message < 3; ++message)
    EXPECT_TRUE(queue.ask(job, std::size_t{1} << 40, kSecond, [] { std::abort(); }));
  EXPECT_FALSE(queue.run(kSecond));
}

}  // namespace
}  // namespace poseidon
