// FairShare: rounds and debts, without a loop.
#include "server/core/fair_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace poseidon {
namespace {

constexpr std::int64_t kSlice = std::chrono::nanoseconds(FairShare::kSlice).count();

TEST(FairShare, TurnsOfARoundEndWithTheSlice) {
  FairShare share;
  std::int64_t time_ns = 1000;
  int turns = 0;
  while (share.begin(1, time_ns)) {
    time_ns += kSlice / 4;
    share.end(time_ns);
    ++turns;
  }
  EXPECT_EQ(turns, 4);
  EXPECT_FALSE(share.begin(1, time_ns));
  EXPECT_TRUE(share.begin(2, time_ns));
}

TEST(FairShare, ALongTurnIsPaidOffInLaterRounds) {
  FairShare share;
  ASSERT_TRUE(share.begin(1, 0));
  share.end(10 * kSlice);
  for (std::uint64_t round = 2; round <= 10; ++round) EXPECT_FALSE(share.begin(round, 0)) << "round " << round;
  EXPECT_TRUE(share.begin(11, 0));
}

TEST(FairShare, WhoHasBeenIdleOwesNothingAndHasSavedNothing) {
  FairShare share;
  ASSERT_TRUE(share.begin(1, 0));
  share.end(3 * kSlice);
  ASSERT_TRUE(share.begin(1'000'000, 0));
  share.end(kSlice);
  EXPECT_FALSE(share.begin(1'000'000, 0));
}

/// A loop in which every ready flow takes a turn while its job may.
TEST(FairShare, JobsGetTheSameTimeWhateverTheirConnectionsAndTurns) {
  struct Job {
    int connections;
    std::int64_t turn_ns;
    FairShare share{};
    std::int64_t taken_ns = 0;
  };
  std::array<Job, 3> jobs{Job{1, kSlice / 10}, Job{100, kSlice / 2}, Job{4, 30 * kSlice}};
  std::int64_t time_ns = 0;
  for (std::uint64_t round = 1; round <= 20'000; ++round) {
    for (Job& job : jobs) {
      // The first job sends so much that its only flow is ready again and again.
      for (int turn = 0; turn < std::max(job.connections, 20); ++turn) {
        if (!job.share.begin(round, time_ns)) break;
        time_ns += job.turn_ns;
        job.taken_ns += job.turn_ns;
        job.share.end(time_ns);
      }
    }
  }
  for (const Job& job : jobs) {
    const double share = static_cast<double>(job.taken_ns) / static_cast<double>(time_ns);
    EXPECT_NEAR(share, 1.0 / 3, 0.01) << job.connections << " connections";
  }
}

}  // namespace
}  // namespace poseidon
