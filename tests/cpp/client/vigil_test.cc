// Which ranks are told to be silent, with times that the test gives.
#include "client/vigil.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using News = Vigil::News;
using AllNews = std::vector<News>;

/// Rank 0 of two, which watches rank 1.
class Watch {
 public:
  enum class State { lives, frozen, unreachable };

  /// Lets the time pass while rank 1 is in the state, and returns what was found.
  AllNews pass(nanoseconds time, State state) {
    AllNews news;
    for (const nanoseconds end = now_ + time; now_ < end;) {
      now_ += vigil.interval();
      if (state == State::lives) heard_ = now_;
      const nanoseconds missing = state == State::unreachable ? now_ - heard_ : nanoseconds(0);
      const std::vector<std::int64_t> heard{0, heard_.count()};
      for (const auto& finding : vigil.judge(now_.count(), heard, [&](std::size_t rank) {
             EXPECT_EQ(rank, 1u);
             return Flow::Answer{missing, round_trip};
           })) {
        EXPECT_EQ(finding.rank, 1u);
        silence = finding.silence;
        news.push_back(finding.news);
      }
    }
    return news;
  }

  /// Lets the time pass while this process does not run.
  void sleep(nanoseconds time) { now_ += time; }
  nanoseconds unreachable_for() const { return vigil.unreachable_for(1, now_.count()); }

  Vigil vigil{2, 1};
  nanoseconds round_trip{0};
  nanoseconds silence{0};  // of the last finding

 private:
  nanoseconds now_ = std::chrono::hours(1);
  nanoseconds heard_ = now_;
};

using State = Watch::State;

TEST(Vigil, TellsNothingOfARankThatLives) {
  Watch watch;
  EXPECT_EQ(watch.pass(seconds(60), State::lives), AllNews());
  EXPECT_EQ(watch.unreachable_for(), nanoseconds(0));
}

TEST(Vigil, TellsAFrozenRankOnceWithinFiveSecondsAndThatItIsBack) {
  Watch watch;
  EXPECT_EQ(watch.pass(milliseconds(1'800), State::frozen), AllNews()) << "machines may be busy";
  EXPECT_EQ(watch.pass(milliseconds(3'200), State::frozen), AllNews{News::frozen});
  EXPECT_EQ(watch.pass(seconds(60), State::frozen), AllNews());
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews{News::back});
  EXPECT_GE(watch.silence, seconds(65));
}

TEST(Vigil, TellsAnUnreachableMachineWithinOneAndAHalfSeconds) {
  Watch watch;
  EXPECT_EQ(watch.pass(milliseconds(800), State::unreachable), AllNews());
  EXPECT_EQ(watch.pass(milliseconds(600), State::unreachable), AllNews{News::unreachable});
  EXPECT_EQ(watch.pass(seconds(10), State::unreachable), AllNews());
  EXPECT_GE(watch.unreachable_for(), seconds(11));
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews{News::back});
  EXPECT_EQ(watch.unreachable_for(), nanoseconds(0));
}

TEST(Vigil, TellsThatTheMachineOfAFrozenRankIsDownToo) {
  Watch watch;
  EXPECT_EQ(watch.pass(seconds(5), State::frozen), AllNews{News::frozen});
  EXPECT_EQ(watch.pass(seconds(5), State::unreachable), AllNews{News::unreachable});
}

TEST(Vigil, BlamesNoMachineForWhatHasBeenSentJustNow) {
  Watch watch;
  EXPECT_EQ(watch.pass(seconds(1), State::frozen), AllNews()) << "nothing is on its way";
  EXPECT_EQ(watch.pass(watch.vigil.interval(), State::unreachable), AllNews());
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews());
}

TEST(Vigil, WaitsTwoRoundTripsLongerForAnAnswer) {
  Watch watch;
  watch.round_trip = milliseconds(400);
  EXPECT_EQ(watch.pass(milliseconds(1'600), State::unreachable), AllNews());
  EXPECT_EQ(watch.pass(milliseconds(400), State::unreachable), AllNews{News::unreachable});
}

TEST(Vigil, IsMorePatientWithARankThatWasSilentForLongBefore) {
  Watch watch;
  EXPECT_EQ(watch.pass(milliseconds(1'800), State::frozen), AllNews());
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews());
  EXPECT_EQ(watch.pass(milliseconds(3'000), State::frozen), AllNews());
  EXPECT_EQ(watch.pass(milliseconds(2'000), State::frozen), AllNews{News::frozen});
}

TEST(Vigil, BlamesNobodyForItsOwnPause) {
  Watch watch;
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews());
  watch.sleep(seconds(30));
  EXPECT_EQ(watch.pass(milliseconds(200), State::unreachable), AllNews()) << "nothing has been read yet";
  EXPECT_EQ(watch.pass(seconds(1), State::lives), AllNews());
}

TEST(Vigil, SendsFewerHeartbeatsAmongManyRanks) {
  EXPECT_EQ(Vigil(8, 7).interval(), milliseconds(200));
  EXPECT_EQ(Vigil(1'000, 1'000).interval(), seconds(8));
}

}  // namespace
}  // namespace poseidon
