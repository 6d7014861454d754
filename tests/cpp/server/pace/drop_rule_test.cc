// Steps of simulated times end as those of servers do.
#include "poseidon/drop_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "server/pace/arrivals.h"

namespace poseidon {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

std::int64_t end_of(DropRule& rule, std::vector<std::int64_t> arrivals_ms, std::int64_t waits_until_ms = 0) {
  for (auto& time : arrivals_ms) time *= kMillisecond;
  return rule.end_step(arrivals_ms, waits_until_ms * kMillisecond) / kMillisecond;
}

TEST(DropRule, TheFirstStepsWaitForAll) {
  DropRule rule(4, 3);
  for (std::uint64_t step = 0; step < ArrivalSpread::kLearningSteps; ++step) EXPECT_EQ(end_of(rule, {1, 2, 3, 90}), 90);
  EXPECT_LT(end_of(rule, {1, 2, 3, 90}), 90);
}

TEST(DropRule, AStepEndsSomeDeviationsAfterItsMedianRank) {
  DropRule rule(4, 3);
  for (std::uint64_t step = 0; step < ArrivalSpread::kLearningSteps; ++step) end_of(rule, {10, 10, 10, 10});
  EXPECT_EQ(end_of(rule, {10, 11, 12, 300}), 12 + ArrivalSpread::kLeastWaitNs / kMillisecond);
  EXPECT_EQ(end_of(rule, {14, 11, 10, 13}), 14) << "all are there before";
  EXPECT_EQ(end_of(rule, {10, 11, 12, 300}, 50), 50) << "some rank is too far behind until then";
  EXPECT_EQ(end_of(rule, {10, 11, 12, 300}, 900), 300);
}

TEST(DropRule, TwoRanksWaitForEachOther) {
  DropRule rule(2, 3);
  for (int step = 0; step < 30; ++step) EXPECT_EQ(end_of(rule, {1, 70}), 70);
}

}  // namespace
}  // namespace poseidon
