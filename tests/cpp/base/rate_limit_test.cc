#include "base/rate_limit.h"

#include <gtest/gtest.h>

namespace poseidon {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kBurstNs = std::chrono::nanoseconds(RateLimit::kBurst).count();

TEST(RateLimit, WhatComesTogetherMovesAtTheRate) {
  RateLimit limit(1000);
  for (std::int64_t message = 0; message < 10; ++message)
    EXPECT_EQ(limit.take(500, kSecond), kSecond - kBurstNs + message * kSecond / 2);
}

TEST(RateLimit, WhoHasPausedMayMoveNoMoreThanABurstAtOnce) {
  RateLimit limit(1000);
  limit.take(5000, kSecond);
  EXPECT_EQ(limit.take(500, 100 * kSecond), 100 * kSecond - kBurstNs);
  EXPECT_EQ(limit.take(500, 100 * kSecond), 100 * kSecond - kBurstNs + kSecond / 2);
}

TEST(RateLimit, WithoutALimitAllMoveAtOnce) {
  RateLimit limit(0);
  for (int message = 0; message < 3; ++message) EXPECT_EQ(limit.take(std::size_t{1} << 40, kSecond), kSecond);
}

TEST(RateLimit, TheLargestMessageDoesNotOverflow) {
  RateLimit limit(1);
  limit.take(std::size_t{1} << 32, kSecond);
  EXPECT_GT(limit.take(1, kSecond), (std::int64_t{1} << 32) * kSecond);
}

}  // namespace
}  // namespace poseidon
