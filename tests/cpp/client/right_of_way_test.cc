// When the servers hold back what is less urgent, with times that the test gives.
#include "client/right_of_way.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace poseidon {
namespace {

using Change = RightOfWay::Change;
using std::chrono::milliseconds;

constexpr std::size_t kMiB = std::size_t{1} << 20;

class Port : public ::testing::Test {
 protected:
  std::int64_t now_ns() const { return std::chrono::nanoseconds(now_).count(); }

  /// Lets the time pass while so much comes in each millisecond, and looks after each interval. Returns the first
  /// change.
  Change pass(milliseconds time, std::size_t bytes_per_ms) {
    for (const milliseconds end = now_ + time; now_ < end;) {
      now_ += milliseconds(1);
      way.arrived(bytes_per_ms, now_ns());
      if (now_ % RightOfWay::kInterval != milliseconds(0)) continue;
      if (const Change change = way.look(now_ns()); change != Change::none) return change;
    }
    return Change::none;
  }

  /// 32 MiB come, and then something urgent does, too.
  Change meet(std::size_t bytes_per_ms, std::size_t urgent_bytes) {
    way.begin(false, 32 * kMiB);
    EXPECT_EQ(pass(milliseconds(100), bytes_per_ms), Change::none) << "nothing is urgent";
    way.begin(true, urgent_bytes);
    return way.look(now_ns());
  }

  RightOfWay way;

 private:
  milliseconds now_{10'000};
};

TEST_F(Port, HoldsUntilTheUrgentOneHasCome) {
  EXPECT_EQ(meet(12'500, 4 * kMiB), Change::hold);
  EXPECT_EQ(pass(milliseconds(335), 12'500), Change::none);
  way.end(true, 4 * kMiB);
  EXPECT_EQ(way.look(now_ns()), Change::release);
  EXPECT_FALSE(way.holds());
}

TEST_F(Port, NothingWaitsForWhatIsAlone) {
  way.begin(true, 4 * kMiB);
  EXPECT_EQ(pass(milliseconds(300), 12'500), Change::none);
}

TEST_F(Port, WhatComesInAMomentIsNotWorthAMessage) {
  EXPECT_EQ(meet(12'500, 64 << 10), Change::none) << "5 ms at this rate";
  EXPECT_EQ(meet(1'250'000, 4 * kMiB), Change::none) << "3 ms at 10 Gb/s";
}

TEST_F(Port, StopsWhenThePortIdles) {
  ASSERT_EQ(meet(12'500, 64 * kMiB), Change::hold);
  EXPECT_EQ(pass(milliseconds(200), 6'000), Change::release) << "the urgent one's sender has no more";
  EXPECT_EQ(pass(milliseconds(900), 12'500), Change::none) << "and it does not try again for a second";
  EXPECT_EQ(pass(milliseconds(200), 12'500), Change::hold);
  EXPECT_EQ(pass(milliseconds(200), 6'000), Change::release);
  EXPECT_EQ(pass(milliseconds(1'900), 12'500), Change::none) << "and then for two";
  EXPECT_EQ(pass(milliseconds(200), 12'500), Change::hold);
}

TEST_F(Port, ShortHoldsAreJudgedTogether) {
  bool gave_up = false;
  way.begin(false, 32 * kMiB);
  pass(milliseconds(100), 12'500);
  for (int i = 0; i < 10 && !gave_up; ++i) {
    way.begin(true, kMiB);
    if (way.look(now_ns()) != Change::hold) gave_up = true;
    pass(milliseconds(60), 3'000);
    way.end(true, kMiB);
    way.look(now_ns());
    pass(milliseconds(60), 12'500);
  }
  EXPECT_TRUE(gave_up);
}

}  // namespace
}  // namespace poseidon
