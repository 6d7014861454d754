// PushWindow: what waits for a server's results, in which order it goes, and that nothing waits for ever.
#include "scheme/push_window.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

constexpr std::size_t kWindowBytes = 1000;
constexpr std::uint16_t kUrgent = 1;
constexpr std::uint16_t kBulk = 5;

class PushWindowTest : public ::testing::Test {
 protected:
  ~PushWindowTest() override { loop_.stop(); }

  /// Pushes chunks of half a window, all in one turn of the loop.
  void push(std::uint16_t level, const std::vector<std::uint32_t>& chunks) {
    loop_.call([&] {
      for (const std::uint32_t chunk : chunks)
        window_.push({0, chunk}, level, kWindowBytes / 2,
                     [this, chunk](bool go) { (go ? sent_ : forgotten_).push_back(chunk); });
    });
  }
  void answer(std::uint32_t chunk) {
    loop_.call([&] { window_.answered({0, chunk}); });
  }
  /// What has been sent so far.
  std::vector<std::uint32_t> sent() {
    std::vector<std::uint32_t> chunks;
    loop_.call([] {});  // what was posted before has run
    loop_.call([&] { chunks = sent_; });
    return chunks;
  }

  using Chunks = std::vector<std::uint32_t>;
  Loop loop_{"window-test"};
  PushWindow window_{loop_, kWindowBytes};
  Chunks sent_;
  Chunks forgotten_;
};

TEST_F(PushWindowTest, WaitsForResultsWhenItIsFull) {
  push(kBulk, {0, 1, 2, 3});
  EXPECT_EQ(sent(), (Chunks{0, 1}));
  answer(1);
  EXPECT_EQ(sent(), (Chunks{0, 1, 2}));
  answer(0);
  EXPECT_EQ(sent(), (Chunks{0, 1, 2, 3}));
}

TEST_F(PushWindowTest, AnAnswerThatIsNotAwaitedMakesNoRoom) {
  push(kBulk, {0, 1, 2});
  answer(7);
  answer(2);
  EXPECT_EQ(sent(), (Chunks{0, 1}));
}

TEST_F(PushWindowTest, OfThoseThatStartTogetherTheMostUrgentGoesFirst) {
  loop_.call([&] {
    push(kBulk, {0, 1, 2});
    push(kUrgent, {3, 4});
  });
  EXPECT_EQ(sent(), (Chunks{3, 4}));
}

// Another worker may have started the urgent push first, and wait for it with what it has in common with this one.
TEST_F(PushWindowTest, LessUrgentPushesTakeNoRoomFromMoreUrgentOnes) {
  push(kBulk, {0, 1, 2});
  EXPECT_EQ(sent(), (Chunks{0, 1}));
  push(kUrgent, {3, 4, 5});
  EXPECT_EQ(sent(), (Chunks{0, 1, 3, 4}));
  answer(0);  // the window is full of urgent pushes and one of the bulk, so nothing of the bulk may go
  answer(1);
  EXPECT_EQ(sent(), (Chunks{0, 1, 3, 4}));
  answer(3);
  EXPECT_EQ(sent(), (Chunks{0, 1, 3, 4, 5}));
}

TEST_F(PushWindowTest, AChunkLargerThanTheWindowGoesWithAnother) {
  loop_.call([&] {
    for (std::uint32_t chunk = 0; chunk < 3; ++chunk)
      window_.push({0, chunk}, kBulk, 10 * kWindowBytes, [this, chunk](bool) { sent_.push_back(chunk); });
  });
  EXPECT_EQ(sent(), (Chunks{0, 1}));
}

TEST_F(PushWindowTest, GoesOnIfAnotherWorkerIsLate) {
  push(kBulk, {0, 1, 2, 3, 4, 5, 6});
  EXPECT_EQ(sent().size(), 2U);
  EXPECT_TRUE(testing::eventually([this] { return sent().size() >= 7; }));
  EXPECT_EQ(sent(), (Chunks{0, 1, 2, 3, 4, 5, 6}));
}

TEST_F(PushWindowTest, GrowsWhileResultsComeAsFastAsTheNetworkIs) {
  using namespace std::chrono_literals;
  Chunks chunks;
  for (std::uint32_t chunk = 0; chunk < 200; ++chunk) chunks.push_back(chunk);
  loop_.call([&] { window_.set_round_trip(10s); });
  push(kBulk, chunks);
  EXPECT_EQ(sent().size(), 2U);
  for (std::uint32_t chunk = 0; chunk < 10; ++chunk) answer(chunk);
  EXPECT_GT(sent().size(), 100U);
  const std::size_t grown = sent().size();
  loop_.call([&] { window_.set_round_trip(0s); });  // now the port is full
  for (std::uint32_t chunk = 10; chunk < grown - 2; ++chunk) answer(chunk);
  EXPECT_LT(sent().size(), grown + 20);
}

TEST_F(PushWindowTest, HoldsNothingOnceItIsOpen) {
  push(kBulk, {0, 1, 2, 3});
  loop_.call([&] { window_.open(); });
  EXPECT_EQ(sent(), (Chunks{0, 1, 2, 3}));
  push(kBulk, {4, 5, 6});
  EXPECT_EQ(sent(), (Chunks{0, 1, 2, 3, 4, 5, 6}));
}

TEST_F(PushWindowTest, ForgetsWhatWaits) {
  push(kBulk, {0, 1, 2, 3});
  EXPECT_EQ(sent(), (Chunks{0, 1}));
  loop_.call([&] { window_.drop(); });
  EXPECT_EQ(sent(), (Chunks{0, 1}));
  EXPECT_EQ(forgotten_, (Chunks{2, 3}));
}

}  // namespace
}  // namespace poseidon
