// The options job_rate and port_rate: a job is held to its rate in each direction, and jobs share the port.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "base/clock.h"
#include "cpp/server/server_fixture.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Floats;
using testing::header_of;
using testing::push_of;
using testing::stored_push_of;

constexpr std::uint64_t kRate = 1'000'000;
constexpr std::size_t kFloats = 12'500;  // 50,000 bytes: 50 ms
constexpr std::uint32_t kMessages = 10;
constexpr auto kLeast = std::chrono::milliseconds(kMessages * 50 - 100);  // the first and the burst come at once
constexpr auto kMost = std::chrono::milliseconds(kMessages * 50 * 4);

class ServerOverTcp : public testing::ServerWithWorkers, public ::testing::Test {
 protected:
  ServerOverTcp() : ServerWithWorkers(make_tcp_transport()) {
    options_.world_size = 0;
    options_.server_cores = 1;
  }

  void push_chunks(testing::End& worker, std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t chunk = first; chunk < first + count; ++chunk) {
      wire::Contribution contribution = push_of(0, 2);
      contribution.chunk = chunk;
      push(worker, contribution, Floats(kFloats, 1));
    }
  }
  /// Rank 1 contributes nothing. The result comes when rank 0's part is here.
  void wait_for_chunk(testing::End& worker, std::uint32_t chunk) {
    wire::Contribution nothing = absent_of(push_of(1, 2));
    nothing.chunk = chunk;
    send(worker, nothing, {});
  }

  Options options_;
};

class JobRate : public ServerOverTcp {
 protected:
  JobRate() {
    options_.job_rate = kRate;
    start(options_, "127.0.0.1:0");
  }
};

class PortRate : public ServerOverTcp {
 protected:
  PortRate() {
    options_.port_rate = kRate;
    start(options_, "127.0.0.1:0");
  }
};

TEST_F(JobRate, HoldsWhatAJobSendsAndNoOtherJob) {
  const auto first = join(0, 2, "fast");
  const auto second = join(1, 2, "fast");
  const auto other = join(0, 1, "other");
  const auto began = Clock::now();
  push_chunks(*first, 0, kMessages);
  push(*other, push_of(0, 1), {1});
  message(*other, 2);
  EXPECT_LT(Clock::now() - began, kLeast);
  wait_for_chunk(*second, kMessages - 1);
  EXPECT_EQ(floats_of(message(*second, 2)), Floats(kFloats, 1));
  EXPECT_GT(Clock::now() - began, kLeast);
  EXPECT_LT(Clock::now() - began, kMost);
}

TEST_F(JobRate, HoldsWhatAJobGetsAndNoOtherJob) {
  const auto worker = join(0, 1, "fast");
  const auto other = join(0, 1, "other");
  push(*worker, stored_push_of(0, 1), Floats(kFloats, 3));
  const auto began = Clock::now();
  for (std::uint32_t pull = 0; pull < kMessages; ++pull) send(*worker, header_of(wire::Kind::pull, 0, 1), {});
  push(*other, push_of(0, 1), {1});
  message(*other, 2);
  EXPECT_LT(Clock::now() - began, kLeast);
  EXPECT_EQ(floats_of(message(*worker, 2 + kMessages)), Floats(kFloats, 3));
  EXPECT_GT(Clock::now() - began, kLeast);
  EXPECT_LT(Clock::now() - began, kMost);
}

TEST_F(PortRate, IsSharedByJobAndNotByConnection) {
  constexpr std::uint32_t kFlows = 4;
  const auto narrow = join(0, 2, "narrow");
  const auto narrow_end = join(1, 2, "narrow");
  std::vector<std::unique_ptr<testing::End>> wide;
  for (std::uint32_t flow = 0; flow < kFlows; ++flow) wide.push_back(join(0, 2, "wide", 0, flow));
  const auto wide_end = join(1, 2, "wide");
  const auto began = Clock::now();
  for (std::uint32_t flow = 0; flow < kFlows; ++flow) push_chunks(*wide[flow], flow * kMessages, kMessages);
  push_chunks(*narrow, 0, kMessages);
  wait_for_chunk(*narrow_end, kMessages - 1);
  for (std::uint32_t flow = 1; flow <= kFlows; ++flow) wait_for_chunk(*wide_end, flow * kMessages - 1);
  message(*narrow_end, 2);
  const auto narrow_time = Clock::now() - began;
  message(*wide_end, 1 + kFlows);
  const auto wide_time = Clock::now() - began;
  // Of the 50 messages 20 have come when narrow's 10 have. By connection it would be all of them.
  EXPECT_LT(narrow_time, wide_time * 6 / 10);
  EXPECT_GT(wide_time, std::chrono::milliseconds((1 + kFlows) * kMessages * 50 - 200));
}

}  // namespace
}  // namespace poseidon
