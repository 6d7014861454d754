#include "transport/loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/file_descriptor.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;

/// A descriptor that is always readable.
FileDescriptor ready_descriptor() {
  FileDescriptor fd(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  EXPECT_TRUE(fd);
  return fd;
}

/// Whatever is ready has been handled afterwards.
void pass_rounds(Loop& loop) {
  for (int round = 0; round < 10; ++round) loop.call([] {});
}

TEST(Loop, RunsTasksInTheOrderOfPosting) {
  std::vector<int> ran;
  {
    Loop loop("order");
    for (int i = 0; i < 1000; ++i) loop.post([&ran, i] { ran.push_back(i); });
  }
  ASSERT_EQ(ran.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(ran[static_cast<std::size_t>(i)], i);
}

TEST(Loop, KeepsEachPostersOrder) {
  constexpr int kPosters = 4;
  constexpr int kPosts = 5000;
  std::array<int, kPosters> next{};
  int out_of_order = 0;
  {
    Loop loop("posters");
    std::vector<std::thread> posters;
    for (int poster = 0; poster < kPosters; ++poster) {
      posters.emplace_back([&, poster] {
        for (int i = 0; i < kPosts; ++i) {
          loop.post([&, poster, i] { out_of_order += next[static_cast<std::size_t>(poster)]++ != i; });
        }
      });
    }
    for (auto& poster : posters) poster.join();
  }
  EXPECT_EQ(out_of_order, 0);
  for (const int count : next) EXPECT_EQ(count, kPosts);
}

TEST(Loop, WakesUpForAPostAfterSleeping) {
  Loop loop("sleeper");
  for (int i = 0; i < 500; ++i) {
    std::promise<void> ran;
    loop.post([&] { ran.set_value(); });
    ASSERT_EQ(ran.get_future().wait_for(std::chrono::seconds(5)), std::future_status::ready);
  }
}

TEST(Loop, RunsWhatTasksPostBeforeItEnds) {
  int ran = 0;
  {
    Loop loop("nested");
    loop.post([&] { loop.post([&] { loop.post([&] { ++ran; }); }); });
  }
  EXPECT_EQ(ran, 1);
}

TEST(Loop, KnowsItsOwnThread) {
  Loop loop("mine");
  Loop other("other");
  EXPECT_FALSE(loop.in_loop_thread());
  loop.call([&] {
    EXPECT_TRUE(loop.in_loop_thread());
    EXPECT_FALSE(other.in_loop_thread());
    bool nested = false;
    loop.call([&] { nested = true; });
    EXPECT_TRUE(nested);
  });
}

TEST(Loop, RunsTimersInTimeOrderAndNotEarly) {
  std::vector<int> order;
  std::promise<void> last;
  Loop loop("timers");
  const auto start = Clock::now();
  loop.call([&] {
    loop.call_at(start + milliseconds(40), [&] {
      order.push_back(3);
      last.set_value();
    });
    loop.call_at(start + milliseconds(10), [&] {
      EXPECT_GE(Clock::now(), start + milliseconds(10));
      order.push_back(1);
    });
    loop.call_at(start + milliseconds(20), [&] { order.push_back(2); });
    loop.call_at(Clock::time_point::max(), [&] { order.push_back(99); });
  });
  last.get_future().wait();
  EXPECT_GE(Clock::now(), start + milliseconds(40));
  loop.call([&] { EXPECT_EQ(order, (std::vector<int>{1, 2, 3})); });
}

TEST(Loop, ACancelledTimerDoesNotRun) {
  std::atomic<int> ran{0};
  std::promise<void> end;
  Loop loop("cancel");
  loop.call([&] {
    const auto when = Clock::now() + milliseconds(5);
    const auto before = loop.call_at(when, [&] { ++ran; });
    loop.cancel(before);
    loop.cancel(before);  // a second time does nothing
    // Due in the same round as the one that cancels it.
    auto victim = std::make_shared<Loop::TimerId>(0);
    loop.call_at(when, [&loop, victim] { loop.cancel(*victim); });
    *victim = loop.call_at(when, [&] { ++ran; });
    loop.call_at(when + milliseconds(20), [&] { end.set_value(); });
  });
  end.get_future().wait();
  EXPECT_EQ(ran, 0);
}

TEST(Loop, ATimerMaySetAnother) {
  std::promise<void> end;
  int left = 5;
  std::function<void()> again;
  Loop loop("chain");
  again = [&] {
    if (--left == 0) return end.set_value();
    loop.call_at(Clock::now(), again);
  };
  loop.call([&] { loop.call_at(Clock::now(), again); });
  EXPECT_EQ(end.get_future().wait_for(std::chrono::seconds(5)), std::future_status::ready);
}

TEST(Loop, CallsTheHandlerOfAReadyDescriptor) {
  const FileDescriptor fd = ready_descriptor();
  std::promise<std::uint32_t> called;
  Loop loop("watch");
  loop.call([&] {
    EXPECT_TRUE(loop.watch(fd.get(), EPOLLIN,
                           [&](std::uint32_t events) {
                             loop.unwatch(fd.get());  // its own
                             called.set_value(events);
                           })
                    .ok());
  });
  EXPECT_EQ(called.get_future().get() & EPOLLIN, static_cast<std::uint32_t>(EPOLLIN));
}

TEST(Loop, RewatchChangesTheEvents) {
  const FileDescriptor fd = ready_descriptor();
  std::atomic<int> calls{0};
  Loop loop("rewatch");
  loop.call([&] {
    EXPECT_TRUE(loop.watch(fd.get(), 0,
                           [&](std::uint32_t) {
                             ++calls;
                             EXPECT_TRUE(loop.rewatch(fd.get(), 0).ok());
                           })
                    .ok());
  });
  pass_rounds(loop);
  EXPECT_EQ(calls, 0);
  loop.call([&] { EXPECT_TRUE(loop.rewatch(fd.get(), EPOLLIN).ok()); });
  pass_rounds(loop);
  EXPECT_EQ(calls, 1);
  loop.call([&] { loop.unwatch(fd.get()); });
}

TEST(Loop, AHandlerMayUnwatchTheOthers) {
  std::vector<FileDescriptor> fds;
  for (int i = 0; i < 20; ++i) fds.push_back(ready_descriptor());
  std::atomic<int> calls{0};
  Loop loop("others");
  loop.call([&] {
    for (const auto& fd : fds) {
      EXPECT_TRUE(loop.watch(fd.get(), EPOLLIN,
                             [&](std::uint32_t) {
                               ++calls;
                               for (const auto& other : fds) loop.unwatch(other.get());
                             })
                      .ok());
    }
  });
  pass_rounds(loop);
  EXPECT_EQ(calls, 1);
}

TEST(Loop, AnEventOfAnUnwatchedDescriptorDoesNotReachItsSuccessor) {
  std::array<FileDescriptor, 2> old = {ready_descriptor(), ready_descriptor()};
  std::atomic<int> calls{0};
  std::atomic<int> successor_calls{0};
  FileDescriptor successor;
  Loop loop("reuse");
  loop.call([&] {
    for (const auto& fd : old) {
      EXPECT_TRUE(
          loop.watch(fd.get(), EPOLLIN,
                     [&](std::uint32_t) {
                       ++calls;
                       for (auto& one : old) loop.unwatch(one.get());
                       for (auto& one : old) one.reset();
                       // Takes the number of a descriptor whose event may still be waiting.
                       successor = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
                       EXPECT_TRUE(
                           loop.watch(successor.get(), EPOLLIN, [&](std::uint32_t) { ++successor_calls; }).ok());
                     })
              .ok());
    }
  });
  pass_rounds(loop);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(successor_calls, 0);
  loop.call([&] { loop.unwatch(successor.get()); });
}

TEST(Loop, WatchingAnInvalidDescriptorIsAnError) {
  Loop loop("invalid");
  loop.call([&] {
    EXPECT_EQ(loop.watch(-1, EPOLLIN, [](std::uint32_t) {}).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(loop.rewatch(12345, EPOLLIN).code(), ErrorCode::invalid_argument);
    loop.unwatch(12345);
  });
}

TEST(Loop, DropsWhatHandlersAndTimersOwnOnItsOwnThread) {
  struct Owned {
    explicit Owned(Loop& owner, int& counter) : loop(owner), dropped(counter) {}
    ~Owned() { dropped += loop.in_loop_thread() ? 1 : 100; }
    Loop& loop;
    int& dropped;
  };
  int dropped = 0;
  const FileDescriptor fd = ready_descriptor();
  {
    Loop loop("drops");
    loop.call([&] {
      const auto first = std::make_shared<Owned>(loop, dropped);
      const auto second = std::make_shared<Owned>(loop, dropped);
      EXPECT_TRUE(loop.watch(fd.get(), 0, [first](std::uint32_t) {}).ok());
      loop.call_at(Clock::time_point::max(), [second] {});
    });
  }
  EXPECT_EQ(dropped, 2);
}

}  // namespace
}  // namespace poseidon
