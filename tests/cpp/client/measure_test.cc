// The measurement of the cost of scheduling.
#include "poseidon/measure.h"

#include <gtest/gtest.h>

namespace poseidon {
namespace {

TEST(SchedulingSeconds, OfAnyNumberOfChunksAndLayers) {
  EXPECT_GE(scheduling_seconds(0, 0), 0);
  EXPECT_GE(scheduling_seconds(1, 100), 0) << "more layers than chunks";
  EXPECT_GT(scheduling_seconds(20'000, 50), 0);
  EXPECT_GT(scheduling_seconds(20'000, 20'000), 0);
}

}  // namespace
}  // namespace poseidon
