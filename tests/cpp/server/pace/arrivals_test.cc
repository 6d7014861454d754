// How long a step waits for late ranks.
#include "server/pace/arrivals.h"

#include <gtest/gtest.h>

namespace poseidon {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(Arrivals, MoreThanHalfIsToldOnce) {
  Arrivals arrivals(4);
  EXPECT_FALSE(arrivals.add(3, 5));
  EXPECT_FALSE(arrivals.add(0, 6));
  EXPECT_FALSE(arrivals.more_than_half()) << "two of four";
  EXPECT_TRUE(arrivals.add(1, 7));
  EXPECT_TRUE(arrivals.more_than_half());
  EXPECT_FALSE(arrivals.add(2, 8));
  arrivals.remove(2);
  arrivals.remove(2);
  EXPECT_TRUE(arrivals.more_than_half());
  arrivals.remove(1);
  EXPECT_FALSE(arrivals.more_than_half());
  arrivals.reset();
  EXPECT_FALSE(arrivals.add(0, 9));
}

TEST(Arrivals, ASlowRankDoesNotShowInTheDeviation) {
  for (const bool comes : {false, true}) {
    Arrivals arrivals(5);
    for (std::uint32_t rank = 0; rank < 4; ++rank) static_cast<void>(arrivals.add(rank, 100 * kMs + rank * kMs));
    if (comes) static_cast<void>(arrivals.add(4, 10'000 * kMs));
    EXPECT_EQ(arrivals.deviation_ns(), 1 * kMs) << "0, 1, 1, 2 and far away from 102 ms";
  }
}

TEST(ArrivalSpread, WaitsForAFewDeviationsAndNoLessThanAFewMilliseconds) {
  ArrivalSpread spread;
  EXPECT_EQ(spread.wait_ns(3), ArrivalSpread::kLeastWaitNs);
  for (int i = 0; i < 64; ++i) spread.add(10 * kMs);
  EXPECT_NEAR(static_cast<double>(spread.wait_ns(3)), 3 * 14.826 * kMs, 1);
  EXPECT_EQ(spread.wait_ns(0), ArrivalSpread::kLeastWaitNs);
  for (int i = 0; i < 31; ++i) spread.add(10'000 * kMs);
  EXPECT_NEAR(static_cast<double>(spread.wait_ns(3)), 3 * 14.826 * kMs, 1) << "less than half of the window";
  for (int i = 0; i < 40; ++i) spread.add(20 * kMs);
  EXPECT_NEAR(static_cast<double>(spread.wait_ns(2)), 2 * 29.652 * kMs, 1) << "it follows";
}

}  // namespace
}  // namespace poseidon
