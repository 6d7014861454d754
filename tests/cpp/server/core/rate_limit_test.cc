// How fast a job may receive and send on a server (Options::rate_limit).
#include "server/core/rate_limit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cpp/server/server_fixture.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Bytes;
using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::header_of;
using testing::push_of;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kAheadNs = std::chrono::nanoseconds(RateLimit::kAhead).count();

TEST(RateLimit, CountsTheBusierDirection) {
  RateLimit rate(1000);
  EXPECT_LE(rate.free_at_ns(), 0);
  rate.charge_received(500, kSecond);
  EXPECT_EQ(rate.free_at_ns(), kSecond * 3 / 2 - kAheadNs);
  rate.charge_sent(200, kSecond);
  EXPECT_EQ(rate.free_at_ns(), kSecond * 3 / 2 - kAheadNs) << "the directions are not added up";
  rate.charge_sent(2000, kSecond);
  EXPECT_EQ(rate.free_at_ns(), kSecond * 32 / 10 - kAheadNs);
}

TEST(RateLimit, WhatDidNotTravelIsGivenBack) {
  RateLimit rate(1000);
  rate.charge_sent(2000, kSecond);
  rate.give_back_sent(1500);
  EXPECT_EQ(rate.free_at_ns(), kSecond * 3 / 2 - kAheadNs);
}

TEST(RateLimit, TimeThatIsNotUsedIsLost) {
  RateLimit rate(1000);
  rate.charge_received(1000, kSecond);
  rate.charge_received(1000, 10 * kSecond);
  EXPECT_EQ(rate.free_at_ns(), 11 * kSecond - kAheadNs);
}

class ServerRate : public testing::ServerWithWorkers, public ::testing::Test {
 protected:
  explicit ServerRate(CodingPolicy coding = CodingPolicy::off) : ServerWithWorkers(make_tcp_transport(with(coding))) {
    options_.world_size = 0;
    options_.timeout = std::chrono::seconds(20);
    options_.rate_limit = kRate;
  }

  /// Pushes steps of one chunk one after the other, as a worker alone. Returns the seconds that they took.
  double steps(End& worker, std::uint64_t first, std::uint64_t count) {
    const auto begin = Clock::now();
    for (std::uint64_t step = first; step < first + count; ++step) {
      send(worker, push_of(0, 1, step), Bytes(kBytes));
      EXPECT_TRUE(worker.recorder.wait_messages(step + 1));
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  static Admission with(CodingPolicy coding) {
    Admission admission;
    admission.coding = coding;
    return admission;
  }

  static constexpr std::uint64_t kRate = 10'000'000;
  static constexpr std::size_t kBytes = 500'000;  // 50 ms of the rate kRate
  Options options_;
};

TEST_F(ServerRate, AJobMovesNoMoreThanItsRateAndOthersAreNotSlowedDown) {
  start(options_, "127.0.0.1:0");
  const auto limited = join(0, 1, "one");
  const auto other = join(0, 1, "other");
  const double seconds = steps(*limited, 1, 9);
  EXPECT_GE(seconds, 8 * 0.05 - 0.02) << "the first push comes at once";
  EXPECT_LE(seconds, 2 * 8 * 0.05);
  const auto begin = Clock::now();
  send(*limited, push_of(0, 1, 10), Bytes(kBytes));
  push(*other, push_of(0, 1, 1), {1, 2});
  EXPECT_EQ(floats_of(message(*other, 2)), (Floats{1, 2}));
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(45));
  EXPECT_TRUE(limited->recorder.wait_messages(11)) << "what was late comes in the end";
}

/// At so low a rate that a slow coder does not matter beside it.
class CodedServerRate : public ServerRate {
 protected:
  CodedServerRate() : ServerRate(CodingPolicy::on) { options_.rate_limit = kRate / 4; }
  static constexpr std::chrono::milliseconds kPlain{200};  // kBytes of the rate, if they were not coded
};

TEST_F(CodedServerRate, AJobIsChargedForTheBytesThatTravel) {
  start(options_, "127.0.0.1:0");
  const auto worker = join(0, 1, "one");
  EXPECT_LE(steps(*worker, 1, 9), std::chrono::duration<double>(8 * kPlain / 2).count())
      << "zeros take next to no bytes";
  const auto begin = Clock::now();
  for (std::uint32_t chunk = 1; chunk <= 20; ++chunk) {
    auto push = push_of(0, 1);
    push.chunk = chunk;
    send(*worker, push, Bytes(kBytes));
  }
  EXPECT_TRUE(worker->recorder.wait_messages(10 + 20));
  EXPECT_LE(Clock::now() - begin, 20 * kPlain / 2) << "also with many under way";
}

TEST_F(ServerRate, AJobThatIsHardlyAheadDoesNotWaitForAnother) {
  start(options_, "127.0.0.1:0");
  const auto far = join(0, 1, "far");
  const auto hardly = join(0, 1, "hardly");
  send(*far, header_of(wire::Kind::assign, 0, 3), Bytes(20 * kBytes));  // a second of the rate
  for (std::size_t count = 0; count < 2; ++count) far->send(header_of(wire::Kind::pull, 0, 3), Bytes());
  ASSERT_TRUE(far->recorder.wait_messages(2));
  EXPECT_LE(steps(*hardly, 1, 4), 0.5);
}

TEST_F(ServerRate, RequestsForValuesAreChargedWithTheAnswers) {
  start(options_, "127.0.0.1:0");
  const auto worker = join(0, 1, "one");
  send(*worker, header_of(wire::Kind::assign, 0, 3), Bytes(kBytes));
  const auto begin = Clock::now();
  for (std::size_t count = 0; count < 8; ++count) worker->send(header_of(wire::Kind::pull, 0, 3), Bytes());
  ASSERT_TRUE(worker->recorder.wait_messages(1 + 8));
  EXPECT_GE(std::chrono::duration<double>(Clock::now() - begin).count(), 7 * 0.05 - 0.02);
}

TEST_F(ServerRate, AServerEndsWhileAJobIsAhead) {
  start(options_, "127.0.0.1:0");
  const auto worker = join(0, 1, "one");
  for (std::uint32_t chunk = 0; chunk < 20; ++chunk) {
    auto push = push_of(0, 1);
    push.chunk = chunk;
    send(*worker, push, Bytes(kBytes));
  }
  const auto begin = Clock::now();
  server.reset();
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(900)) << "what waits for the rate would take a second";
}

}  // namespace
}  // namespace poseidon
