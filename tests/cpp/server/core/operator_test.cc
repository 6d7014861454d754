// What a server's operator sees of its jobs, and what draining and evicting do to them.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/server/server_fixture.h"
#include "simulation/virtual_time.h"
#include "transport/tcp/tcp_transport.h"
#include "wire/messages/ending.h"

namespace poseidon {
namespace {

using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::push_of;
using testing::Received;
using testing::text_of;

class OperatorTest : public ::testing::TestWithParam<Assignment>, protected testing::ServerWithWorkers {
 protected:
  OperatorTest() : ServerWithWorkers(make_tcp_transport()) {
    options_.world_size = 0;
    options_.timeout = std::chrono::seconds(20);
    options_.server_cores = 2;
    options_.memory_limit = 64u << 20;
    options_.assignment = GetParam();
  }

  void start() { ServerWithWorkers::start(options_, "127.0.0.1:0"); }

  /// Connects a rank to both cores.
  std::vector<std::unique_ptr<End>> enter(const std::string& job, std::uint32_t rank, std::uint32_t worker_count,
                                          std::uint32_t generation = 1, const std::string& run = "run") {
    std::vector<std::unique_ptr<End>> ends;
    for (std::size_t core = 0; core < 2; ++core) {
      ends.push_back(connect(core));
      greet(*ends.back(), job, rank, worker_count, generation, run);
      const Received answer = message(*ends.back(), 1);
      EXPECT_EQ(answer.header.kind, wire::Kind::hello) << text_of(answer);
    }
    return ends;
  }
  void greet(End& end, const std::string& job, std::uint32_t rank, std::uint32_t worker_count, std::uint32_t generation,
             const std::string& run) {
    say_hello(end, {rank, worker_count, job, 0, {}, 0, generation, wire::Pace(), run});
  }
  void expect_refused(const std::string& job, std::uint32_t generation, const std::string& run,
                      const std::string& word) {
    const auto end = connect();
    greet(*end, job, 0, 1, generation, run);
    const Received answer = message(*end, 1);
    EXPECT_EQ(answer.header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(answer).find(word), std::string::npos) << text_of(answer);
  }

  /// Waits until the server says so.
  template <typename Condition>
  static void wait_until(const Condition& condition) {
    ASSERT_TRUE(testing::eventually(condition));
  }
  void wait_for_jobs(std::size_t count) {
    wait_until([&] { return server->report().jobs.size() == count; });
  }
  void leave(std::vector<std::unique_ptr<End>>& ends) {
    for (auto& end : ends) {
      send(*end, wire::Goodbye::make(), {});
      end->close(std::chrono::milliseconds(1000));
    }
    ends.clear();
  }

  Options options_;
};

TEST_P(OperatorTest, AReportAddsUpTheCores) {
  start();
  const auto first = enter("first", 0, 2, 3);
  const auto other = enter("other", 0, 1);
  push(*first[0], push_of(0, 2), Floats(1000, 1));
  wait_until([&] { return server->report().jobs.front().open_chunk_count == 1; });
  push(*other[0], push_of(0, 1), {1, 2});
  EXPECT_EQ(floats_of(message(*other[0], 2)), (Floats{1, 2}));
  ServerReport report = server->report();
  ASSERT_EQ(report.jobs.size(), 2u);
  const JobReport& job = report.jobs[0];
  EXPECT_EQ(job.name, "first");
  EXPECT_EQ(job.secret, 0u);
  EXPECT_EQ(job.generation, 3u);
  EXPECT_EQ(job.worker_count, 2u);
  EXPECT_EQ(job.connected_count, 1u) << "one rank, over both cores";
  EXPECT_GT(job.bytes_received, 4000u);
  EXPECT_LT(job.bytes_received, 6000u);
  EXPECT_GT(job.bytes_sent, 0u);
  EXPECT_GE(job.memory_bytes, 4000u);
  EXPECT_EQ(job.memory_limit_bytes, 64u << 20);
  EXPECT_EQ(job.open_chunk_count, 1u);
  EXPECT_GE(job.age_s, job.silent_s);
  EXPECT_LT(job.age_s, 10);
  EXPECT_EQ(report.jobs[1].name, "other");
  EXPECT_EQ(report.jobs[1].open_chunk_count, 0u);
  EXPECT_GE(report.bytes_received, job.bytes_received + report.jobs[1].bytes_received);
  EXPECT_GE(report.memory_bytes, job.memory_bytes);

  wait_until([&] { return server->report().jobs[0].silent_s > 0.29; });
}

TEST_P(OperatorTest, BytesOfConnectionsThatHaveClosedStayInTheReport) {
  start();
  auto leaving = enter("job", 0, 2);
  const auto staying = enter("job", 1, 2);
  push(*leaving[0], push_of(0, 2), Floats(1000, 1));
  wait_until([&] { return server->report().jobs.front().bytes_received > 4000; });
  leaving.clear();
  wait_until([&] { return server->report().jobs.front().connected_count == 1; });
  EXPECT_GT(server->report().jobs.front().bytes_received, 4000u);
}

TEST_P(OperatorTest, AJobWhoseWorkersHaveGoneHoldsNothing) {
  start();
  auto ends = enter("job", 0, 2);
  push(*ends[0], push_of(0, 2), Floats(100'000, 1));
  wait_until([&] { return server->report().bytes_received > 400'000; });
  EXPECT_GE(server->report().memory_bytes, 400'000u);
  ends.clear();  // without a goodbye
  wait_until([&] { return server->report().jobs.at(0).lost; });
  wait_until([&] { return server->report().memory_bytes == 0; });
  EXPECT_GT(server->report().bytes_received, 400'000u) << "what has ended counts in the whole";
}

TEST_P(OperatorTest, AServerThatDrainsTakesNoNewJobAndIsDrainedWhenItsLastHasGone) {
  start();
  auto worker = enter("job", 0, 2);
  server->drain();
  EXPECT_TRUE(server->draining());
  expect_refused("other", 1, "run", "being drained");
  expect_refused("job", 1, "another run", "being drained");
  auto late = enter("job", 1, 2);  // of a job that is here
  push(*worker[0], push_of(0, 2), {1, 2});
  push(*late[0], push_of(1, 2), {3, 4});
  EXPECT_EQ(floats_of(message(*worker[0], 2)), (Floats{4, 6}));
  EXPECT_FALSE(server->drained());
  leave(worker);
  leave(late);
  wait_until([&] { return server->drained(); });
}

TEST_P(OperatorTest, AServerWithoutJobsIsDrainedAtOnce) {
  start();
  EXPECT_FALSE(server->drained());
  server->drain();
  EXPECT_TRUE(server->drained());
}

TEST_P(OperatorTest, ADrainingServerWaitsForAJobThatHasLostAWorker) {
  options_.timeout = std::chrono::seconds(2);
  start();
  auto worker = enter("job", 0, 1, 1, "first");
  server->drain();
  worker.clear();  // without a goodbye
  wait_until([&] { return server->report().jobs.at(0).lost; });
  EXPECT_EQ(server->report().jobs[0].worker_count, 1u);
  EXPECT_FALSE(server->drained());
  auto back = enter("job", 0, 1, 2, "second");  // its next generation
  expect_refused("other", 1, "third", "being drained");
  EXPECT_FALSE(server->report().jobs.at(0).lost);
  back.clear();
  wait_until([&] { return server->report().jobs.at(0).lost; });
  EXPECT_FALSE(server->drained());
  wait_until([&] { return server->drained(); });  // it does not come back within the timeout
  EXPECT_TRUE(server->report().jobs.empty());
}

TEST_P(OperatorTest, AnEvictedJobEndsAloneAndGivesItsMemoryBack) {
  start();
  const auto evicted = enter("hog", 0, 2);
  const auto other = enter("other", 0, 1);
  push(*evicted[0], push_of(0, 2), Floats(100'000, 1));
  wait_until([&] { return server->report().memory_bytes >= 400'000; });
  EXPECT_FALSE(server->evict("nobody", 0));
  EXPECT_FALSE(server->evict("hog", 1)) << "there are no secrets";
  ASSERT_TRUE(server->evict("hog", 0));
  for (const auto& end : evicted) {
    const Received last = message(*end, 2);
    EXPECT_EQ(last.header.kind, wire::Kind::abort);
    EXPECT_NE(text_of(last).find("the operator of this server has evicted job 'hog'"), std::string::npos);
    EXPECT_EQ(end->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  wait_until([&] { return server->report().memory_bytes < 400'000; });
  const auto jobs = server->report().jobs;
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].name, "other");
  push(*other[0], push_of(0, 1), {5});
  EXPECT_EQ(floats_of(message(*other[0], 2)), Floats{5});
}

TEST_P(OperatorTest, AnEvictedJobComesBackOnlyWhenItIsStartedAgain) {
  start();
  auto evicted = enter("hog", 0, 1, 2, "run");
  ASSERT_TRUE(server->evict("hog", 0));
  expect_refused("hog", 2, "run", "has evicted job 'hog'");
  expect_refused("hog", 3, "later", "has evicted job 'hog'");  // its survivors' next generation
  evicted.clear();
  const auto again = enter("hog", 0, 1, 1, "started again");
  push(*again[0], push_of(0, 1), {5});
  EXPECT_EQ(floats_of(message(*again[0], 2)), Floats{5});
}

INSTANTIATE_TEST_SUITE_P(Assignments, OperatorTest, ::testing::Values(Assignment::chunk, Assignment::worker),
                         [](const auto& info) { return info.param == Assignment::chunk ? "Chunk" : "Worker"; });

}  // namespace
}  // namespace poseidon
