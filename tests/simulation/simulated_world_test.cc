#include "simulation/simulated_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "base/executor.h"
#include "base/one_thread.h"
#include "base/random_bytes.h"
#include "base/thread.h"
#include "transport/loop.h"

namespace poseidon::testing {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(SimulatedWorld, APauseOfAnHourTakesNoTime) {
  const std::int64_t begun_ns = now_ns();
  in_virtual_time([] {
    const auto begun = Clock::now();
    const std::int64_t wall_begun_ns = wall_ns();
    pause_for(hours(1));
    EXPECT_GE(Clock::now() - begun, hours(1));
    EXPECT_LT(Clock::now() - begun, hours(1) + milliseconds(1));
    EXPECT_GE(wall_ns() - wall_begun_ns, std::chrono::nanoseconds(hours(1)).count());
    EXPECT_GE(ran_since_ns(hours(1)), begun.time_since_epoch().count());
  });
  EXPECT_LT(std::chrono::nanoseconds(now_ns() - begun_ns), seconds(10)) << "the real clock is back";
}

TEST(SimulatedWorld, LoopsRunTasksInOrderAndTimersOnTime) {
  in_virtual_time([] {
    Loop first("first");
    Loop second("second");
    std::vector<int> order;
    first.call([&] {
      EXPECT_TRUE(first.in_loop_thread());
      EXPECT_FALSE(second.in_loop_thread());
      first.call_at(Clock::now() + milliseconds(20), [&] { order.push_back(3); });
      const auto cancelled = first.call_at(Clock::now() + milliseconds(15), [&] { order.push_back(-1); });
      first.call_at(Clock::now() + milliseconds(10), [&, cancelled] {
        first.cancel(cancelled);
        second.call([&] { order.push_back(2); });  // a loop may wait for another
      });
      order.push_back(1);
    });
    const auto begun = Clock::now();
    pause_for(seconds(1));
    EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
    EXPECT_LT(Clock::now() - begun, milliseconds(1001));
  });
}

TEST(SimulatedWorld, AWaitEndsByANotificationOrByTime) {
  in_virtual_time([] {
    std::mutex mutex;
    Condition changed;
    bool done = false;
    Thread other("other", [&] {
      pause_for(seconds(5));
      const std::lock_guard lock(mutex);
      done = true;
      changed.notify_all();
    });
    std::unique_lock lock(mutex);
    const auto begun = Clock::now();
    EXPECT_FALSE(changed.wait_for(lock, seconds(2), [&] { return done; }));
    EXPECT_GE(Clock::now() - begun, seconds(2));
    EXPECT_TRUE(changed.wait_for(lock, seconds(60), [&] { return done; }));
    EXPECT_LT(Clock::now() - begun, seconds(6));
    lock.unlock();
    other.join();
  });
}

TEST(SimulatedWorld, AnExecutorFinishesWhatItWasGiven) {
  in_virtual_time([] {
    std::array<int, 100> parts{};
    const Completion done = Completion::make();
    Executor executor(3);
    executor.run(
        parts.size(), [&](std::size_t part) { ++parts[part]; }, [done] { done.complete(); });
    EXPECT_FALSE(done.wait_for(seconds(0)));
    done.wait();
    EXPECT_EQ(std::ranges::count(parts, 1), 100);
  });
}

/// What three threads do that race for a counter.
std::string race(std::uint64_t seed) {
  SimulatedWorld world(seed);
  world.trace().keep();
  world.run([&world] {
    int next = 0;
    std::vector<Thread> threads;
    for (const char* const name : {"a", "b", "c"})
      threads.emplace_back(name, [&world, &next] {
        for (int i = 0; i < 20; ++i) {
          world.note(std::to_string(next++));
          pause_for(milliseconds(1));
        }
      });
    for (Thread& thread : threads) thread.join();
    std::array<std::byte, 8> random{};
    fill_with_random_bytes(random);
    world.note(std::to_string(std::to_integer<int>(random[0])));
  });
  EXPECT_GE(world.trace().line_count(), 61u);
  return world.trace().text();
}

TEST(SimulatedWorld, TheSeedDecidesTheOrder) {
  const std::string first = race(1);
  EXPECT_EQ(race(1), first);
  EXPECT_NE(race(2), first);
}

TEST(SimulatedWorldDeathTest, SaysWhoWaitsForWhatIfNobodyCanGoOn) {
  EXPECT_DEATH(in_virtual_time([] {
                 Loop loop("psd-idle");
                 std::mutex mutex;
                 Condition never;
                 std::unique_lock lock(mutex);
                 never.wait(lock, [] { return false; });
               }),
               "nobody can go on\n  main waits for a condition\n  psd-idle waits for a task");
}

TEST(SimulatedWorldDeathTest, EndsARunThatTakesTooLong) {
  EXPECT_DEATH(SimulatedWorld(1, seconds(10)).run([] {
    for (;;) pause_for(seconds(1));
  }),
               "stands still after 9.*it takes too long\n  main waits for a pause");
}

#ifdef POSEIDON_CHECKS
TEST(SimulatedWorldDeathTest, AnObjectOfALoopIsNotUsedByAnotherThread) {
  EXPECT_DEATH(in_virtual_time([] {
                 Loop loop("psd-own");
                 loop.call([] {});
                 loop.call_at(Clock::now(), [] {});
               }),
               R"(thread .* \(main\) uses an object of a loop's own thread, which belongs to thread .* \(psd-own\))");
}

TEST(SimulatedWorld, WhatALoopOwnedBelongsToWhoeverHasStoppedIt) {
  in_virtual_time([] {
    OneThread owned{"an object"};
    {
      Loop loop("psd-own");
      loop.call([&] { owned.check(); });
    }
    owned.check();
  });
}
#endif

}  // namespace
}  // namespace poseidon::testing
