#include "transport/coding_choice.h"

#include <gtest/gtest.h>

namespace poseidon {
namespace {

/// A loop that is busy for so long and then waits for so long, again and again.
class CodingChoiceTest : public ::testing::Test {
 protected:
  /// Until the choice has been made anew.
  void run(double busy_share, std::size_t plain_bytes_per_ms = 0) {
    constexpr std::int64_t kMs = 1'000'000;
    for (int round = 0; round < 25; ++round) {
      const auto busy_ns = static_cast<std::int64_t>(busy_share * kMs);
      choice_.on_plain(plain_bytes_per_ms);
      choice_.on_wait(time_ns_ + busy_ns);
      time_ns_ += kMs;
      choice_.on_wake(time_ns_);
    }
  }

  CodingChoice choice_;
  std::int64_t time_ns_ = 1;
};

TEST_F(CodingChoiceTest, BeginsWithCoding) { EXPECT_TRUE(choice_.pays()); }

TEST_F(CodingChoiceTest, EndsWhereTheLoopNeverWaitsForTheNetwork) {
  choice_.begin_message();
  run(0.85);
  EXPECT_TRUE(choice_.pays());
  run(0.99);
  EXPECT_FALSE(choice_.pays());
}

TEST_F(CodingChoiceTest, DoesNotLookAtTimeInWhichNothingIsUnderWay) {
  run(1.0);
  EXPECT_TRUE(choice_.pays()) << "a loop that does other things";
  choice_.begin_message();
  choice_.end_message();
  run(1.0);
  EXPECT_TRUE(choice_.pays());
}

TEST_F(CodingChoiceTest, BeginsAgainOnlyWithTimeForWhatWouldBeCoded) {
  choice_.begin_message();
  choice_.on_coded(1'000'000, 500'000);  // 2 GB a second
  run(1.0);
  ASSERT_FALSE(choice_.pays());
  run(0.3, 1'000'000);  // and half of the time for coding
  EXPECT_FALSE(choice_.pays());
  run(0.1, 1'000'000);
  EXPECT_TRUE(choice_.pays());
}

TEST_F(CodingChoiceTest, DoesNotChangeBetweenTheTwoBounds) {
  choice_.begin_message();
  run(0.8);
  EXPECT_TRUE(choice_.pays());
  run(1.0);
  run(0.8);
  EXPECT_FALSE(choice_.pays());
}

}  // namespace
}  // namespace poseidon
