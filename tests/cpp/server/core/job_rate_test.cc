// The option job_rate: a job is held to its rate in each direction, and no other job with it.
#include <gtest/gtest.h>

#include <memory>

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

class JobRate : public testing::ServerWithWorkers, public ::testing::Test {
 protected:
  JobRate() : ServerWithWorkers(make_tcp_transport()) {
    Options options;
    options.world_size = 0;
    options.job_rate = kRate;
    options.server_cores = 1;
    start(options, "127.0.0.1:0");
  }
};

TEST_F(JobRate, HoldsWhatAJobSendsAndNoOtherJob) {
  const auto first = join(0, 2, "fast");
  const auto second = join(1, 2, "fast");
  const auto other = join(0, 1, "other");
  const auto began = Clock::now();
  for (std::uint32_t chunk = 0; chunk < kMessages; ++chunk) {
    wire::Contribution contribution = push_of(0, 2);
    contribution.chunk = chunk;
    push(*first, contribution, Floats(kFloats, 1));
  }
  push(*other, push_of(0, 1), {1});
  message(*other, 2);
  EXPECT_LT(Clock::now() - began, kLeast);
  wire::Contribution last = absent_of(push_of(1, 2));
  last.chunk = kMessages - 1;
  send(*second, last, {});
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

}  // namespace
}  // namespace poseidon
