// What may go into the queue of the host's own port: how much follows from what leaves it, and who is asked.
#include "transport/tcp/host_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cpp/transport/connected_socket.h"
#include "poseidon/options.h"
#include "transport/traffic_class.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using tcp::HostQueue;
using tcp::QueueLimit;

/// A port that sends `bytes_per_ms`, seen each millisecond by connections that fill what they may.
struct Port {
  std::size_t bytes_per_ms;
  QueueLimit limit;
  std::size_t queued_bytes = 0;
  Clock::time_point now = Clock::now();
  std::size_t dry = 0;  // how many times it was empty

  void run(int milliseconds_long) {
    for (int i = 0; i < milliseconds_long; ++i) {
      queued_bytes = std::max(queued_bytes, limit.bytes());
      const std::size_t left_bytes = std::min(queued_bytes, bytes_per_ms);
      queued_bytes -= left_bytes;
      if (queued_bytes == 0) ++dry;
      now += milliseconds(1);
      limit.look(now, queued_bytes, left_bytes, true);
    }
  }
};

TEST(QueueLimit, FallsToTwiceWhatLeavesBetweenTwoLooks) {
  Port port{.bytes_per_ms = 100'000};
  port.run(1'000);
  EXPECT_EQ(port.limit.bytes(), 200'000u);
  EXPECT_EQ(port.dry, 0u) << "a port that has something to send stood still";
}

TEST(QueueLimit, IsNeverLessThanASlowPortNeeds) {
  Port port{.bytes_per_ms = 1'000};
  port.run(1'000);
  EXPECT_EQ(port.limit.bytes(), 16u << 10);
}

TEST(QueueLimit, RisesWhereAPortRunsDry) {
  Port port{.bytes_per_ms = 1'000};
  port.run(1'000);
  port.bytes_per_ms = 1'000'000;
  port.run(100);
  EXPECT_GT(port.limit.bytes(), 1'000'000u);
  port.dry = 0;
  port.run(1'000);
  EXPECT_LE(port.dry, 10u);
}

TEST(QueueLimit, StaysWhereTheQueueEmptiesByItself) {
  QueueLimit limit;
  const std::size_t before = limit.bytes();
  for (int i = 0; i < 1'000; ++i) limit.look(Clock::now() + milliseconds(i), i % 10 == 0 ? 0 : 5'000, 1'000, false);
  EXPECT_EQ(limit.bytes(), before);
}

class HostQueueTest : public ConnectedSocket {
 protected:
  static constexpr std::size_t kUnlimited = ~std::size_t{0};
  // More than all other tests of this process send.
  static constexpr std::size_t kPlenty = std::size_t{1} << 40;
  static void pass_looks() { std::this_thread::sleep_for(milliseconds(5)); }  // it looks at the kernel's queue
};

TEST_F(HostQueueTest, WhoYieldsHasALimitWhereOthersSendAGoodPart) {
  const HostQueue::Member urgent(socket_.get(), false);
  const HostQueue::Member bulk(socket_.get(), true);
  bulk.add(kPlenty);
  urgent.add(kPlenty / 100);
  EXPECT_EQ(bulk.room(), kUnlimited) << "what others send is little";
  urgent.add(kPlenty / 10);
  pass_looks();
  EXPECT_LT(bulk.room(), kUnlimited);
  EXPECT_GT(bulk.room(), 0u) << "nothing is in a queue any more";
  EXPECT_EQ(urgent.room(), kUnlimited);
  bulk.add(bulk.room());
  EXPECT_EQ(bulk.room(), 0u);
  EXPECT_EQ(urgent.room(), kUnlimited);
  pass_looks();
  EXPECT_GT(bulk.room(), 0u);
}

TEST(HostQueue, OnlyTheLastOfSeveralClassesYields) {
  Options options;
  EXPECT_FALSE(traffic_class_of(options, 0).yields);
  EXPECT_TRUE(traffic_class_of(options, 0).shared);
  EXPECT_TRUE(traffic_class_of(options, 1).yields);
  options.priority_classes = 1;
  EXPECT_FALSE(traffic_class_of(options, 0).yields);
  EXPECT_FALSE(traffic_class_of(options, 0).shared);
}

}  // namespace
}  // namespace poseidon::testing
