// The levels and classes that follow from urgencies.
#include "plan/priority.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "poseidon/plan.h"
#include "wire/header.h"

namespace poseidon {
namespace {

/// Returns 1 − l/L for each of L layers, in order.
std::vector<double> urgencies(int layer_count) {
  std::vector<double> all;
  for (int layer = 0; layer < layer_count; ++layer) all.push_back(1 - static_cast<double>(layer) / layer_count);
  return all;
}

TEST(Level, GoldenValues) {
  EXPECT_EQ(level_of(1), 1);
  EXPECT_EQ(level_of(0), 1022);
  EXPECT_EQ(level_of(0.5), 512);  // 511.5, rounded
  EXPECT_EQ(level_of(0.75), 256);
  EXPECT_EQ(level_of(0.25), 767);
}

TEST(Level, FallsWithTheUrgencyAndLeavesTheEndsFree) {
  for (const int count : {1, 2, 3, 50, 1000, 5000}) {
    std::uint16_t before = wire::kFirstPriority;
    for (const double urgency : urgencies(count)) {
      const std::uint16_t level = level_of(urgency);
      EXPECT_GE(level, before);
      EXPECT_GT(level, wire::kFirstPriority) << "hello and abort go before any layer";
      EXPECT_LT(level, wire::kLastPriority) << "goodbye goes after any layer";
      before = level;
    }
  }
}

TEST(Level, TellsAThousandLayersApart) {
  std::map<std::uint16_t, int> count;
  for (const double urgency : urgencies(1000)) ++count[level_of(urgency)];
  EXPECT_EQ(count.size(), 1000u);
}

TEST(Class, OfTwoFollowsTheThreshold) {
  EXPECT_EQ(priority_class(0.8, 0.8, 2), 1) << "only what is above it is urgent";
  EXPECT_EQ(priority_class(std::nextafter(0.8, 1.0), 0.8, 2), 0);
  EXPECT_EQ(priority_class(1, 0.8, 2), 0);
  EXPECT_EQ(priority_class(0, 0.8, 2), 1);
}

TEST(Class, ThresholdsAtTheEnds) {
  for (int classes = 1; classes <= 8; ++classes) {
    const auto last = static_cast<std::uint8_t>(classes - 1);
    EXPECT_EQ(priority_class(1, 1, classes), last) << "no layer is above 1";
    EXPECT_EQ(priority_class(0, 0, classes), last) << "nor is 0 above 0";
    EXPECT_EQ(priority_class(1, 0, classes), 0);
    EXPECT_EQ(priority_class(1e-9, 0, classes), classes == 1 ? 0 : last - 1) << "everything else is above 0";
  }
}

TEST(Class, OfThreeAndFourDividesWhatIsAboveTheThreshold) {
  const double threshold = 0.4;
  EXPECT_EQ(priority_class(1, threshold, 3), 0);
  EXPECT_EQ(priority_class(0.71, threshold, 3), 0);
  EXPECT_EQ(priority_class(0.69, threshold, 3), 1);
  EXPECT_EQ(priority_class(0.41, threshold, 3), 1);
  EXPECT_EQ(priority_class(0.4, threshold, 3), 2);
  EXPECT_EQ(priority_class(0.81, threshold, 4), 0);
  EXPECT_EQ(priority_class(0.79, threshold, 4), 1);
  EXPECT_EQ(priority_class(0.61, threshold, 4), 1);
  EXPECT_EQ(priority_class(0.59, threshold, 4), 2);
  EXPECT_EQ(priority_class(0.1, threshold, 4), 3);
}

TEST(Class, NeverFallsAsTheUrgencyDoesAndAllAreUsed) {
  for (int classes = 1; classes <= 8; ++classes) {
    for (const double threshold : {0.0, 0.3, 0.5, 0.95}) {
      std::map<int, int> count;
      int before = 0;
      for (const double urgency : urgencies(1000)) {
        const int chosen = priority_class(urgency, threshold, classes);
        EXPECT_GE(chosen, before);
        before = chosen;
        ++count[chosen];
      }
      const int below = threshold > 0 || classes == 1 ? 1 : 0;  // with 0 nothing is below: the least is 1/1000
      EXPECT_EQ(count.size(), static_cast<std::size_t>(classes - 1 + below)) << classes << " classes, " << threshold;
      EXPECT_LT(before, classes);
    }
  }
}

TEST(PriorityMap, WhatNobodySetGoesLastInTheLastClass) {
  for (const int classes : {1, 2, 8}) {
    const PriorityMap map(classes);
    for (const std::uint32_t unit : {0u, 7u, 0xffffffffu}) {
      EXPECT_EQ(map.of(unit).level, level_of(0));
      EXPECT_EQ(map.of(unit).priority_class, classes - 1);
    }
  }
}

TEST(PriorityMap, RemembersWhatWasSetLast) {
  PriorityMap map(4);
  map.set(5, {3, 1});
  map.set(2, {9, 2});
  map.set(5, {4, 0});
  EXPECT_EQ(map.of(5).level, 4);
  EXPECT_EQ(map.of(5).priority_class, 0);
  EXPECT_EQ(map.of(2).level, 9);
  EXPECT_EQ(map.of(2).priority_class, 2);
  for (const std::uint32_t unit : {0u, 1u, 3u, 4u, 6u}) EXPECT_EQ(map.of(unit).priority_class, 3) << unit;
}

}  // namespace
}  // namespace poseidon
