// OneThread: which thread may use an object. The checks exist in builds with POSEIDON_CHECKS, as .ci/run makes
// them.
#include "base/one_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "base/buffer_pool.h"
#include "transport/loop.h"
#include "transport/tcp/send_queue.h"

namespace poseidon {
namespace {

#ifdef POSEIDON_CHECKS

/// A thread that lives until the object ends.
class Other {
 public:
  template <typename Task>
  explicit Other(Task task)
      : thread_([this, task] {
          task();
          done_ = true;
          while (!ends_) std::this_thread::yield();
        }) {
    while (!done_) std::this_thread::yield();
  }
  ~Other() {
    ends_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

class OneThreadTest : public ::testing::Test {
 protected:
  // The child of a plain fork has the numbers of its parent's threads, which have ended there.
  OneThreadTest() { ::testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

  const OneThread object_{"a Thing"};
};
using OneThreadDeathTest = OneThreadTest;

TEST_F(OneThreadDeathTest, AnotherThreadThatUsesTheObjectEndsTheProcess) {
  object_.check();
  object_.check();
  EXPECT_DEATH(Other([this] { object_.check(); }),
               "at tests/cpp/base/one_thread_test.cc:[0-9]+: thread [0-9]+ \\(.+\\) uses a Thing, which belongs to "
               "thread [0-9]+ \\(.+\\)");
}

TEST_F(OneThreadDeathTest, ClassesOfTheLibraryCheckIt) {
  const auto pool = std::make_shared<BufferPool>();
  Buffer buffer = pool->take(1);
  EXPECT_DEATH(Other([&] { pool->give_back(std::move(buffer)); }), "src/base/buffer_pool.h.* uses BufferPool");
  CodingChoice choice;
  tcp::SendQueue queue(choice);
  EXPECT_TRUE(queue.empty());
  EXPECT_DEATH(Other([&] { queue.take_all(); }), "src/transport/tcp/send_queue.cc.* uses SendQueue");
}

TEST_F(OneThreadTest, AnObjectThatIsHandedOverBelongsToTheNextThread) {
  object_.check();
  object_.hand_over();
  const Other next([this] { object_.check(); });
  EXPECT_DEATH(object_.check(), "uses a Thing");
}

TEST_F(OneThreadTest, ACopyBelongsToNobody) {
  object_.check();
  const Other first([copy = object_] { copy.check(); });
  OneThread assigned{"a Thing"};
  assigned.check();
  assigned = object_;
  const Other second([&assigned] { assigned.check(); });
}

TEST_F(OneThreadTest, WhatAThreadLeavesBehindBelongsToTheNextOne) {
  std::thread([this] { object_.check(); }).join();
  object_.check();
  EXPECT_DEATH(Other([this] { object_.check(); }), "uses a Thing");
}

TEST_F(OneThreadTest, ThreadsMayTakeTurns) {
  for (int round = 0; round < 2; ++round) {
    { const OneThread::Turn turn(object_); }
    const Other next([this] { const OneThread::Turn turn(object_); });
  }
  const OneThread::Turn turn(object_);
  EXPECT_DEATH(Other([this] { const OneThread::Turn other(object_); }), "uses a Thing");
}

TEST_F(OneThreadTest, ALoopKnowsItsThread) {
  Loop loop("psd-test");
  loop.call([&loop] { loop.check_thread(); });
  loop.check_other_thread();
  EXPECT_DEATH(loop.check_thread(), "uses an object of a loop.*belongs to thread [0-9]+ \\(psd-test\\)");
  EXPECT_DEATH(loop.call_at(Clock::now(), [] {}), "src/transport/loop.cc.* uses an object of a loop");
  EXPECT_DEATH(loop.call([&loop] { loop.stop(); }), "\\(psd-test\\) must not call this");
  loop.stop();
  loop.check_thread();  // whoever has stopped it destroys what is left
  loop.check_other_thread();
}

#else

TEST(OneThread, CostsNothingWithoutChecks) {
  struct Plain {
    int number = 0;
  };
  struct Checked {
    int number = 0;
    [[no_unique_address]] OneThread one_thread{"Checked"};
  };
  EXPECT_EQ(sizeof(Checked), sizeof(Plain));
}

#endif

}  // namespace
}  // namespace poseidon
