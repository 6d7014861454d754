// Tests in virtual time: their pauses take none, and the order of their threads follows from a seed.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/thread.h"
#include "simulation/simulated_world.h"

/// A test that runs in a simulated world. Everything that it starts has to end before it does.
#define TEST_IN_VIRTUAL_TIME(suite, name)                           \
  static void suite##_##name();                                     \
  TEST(suite, name) {                                               \
    ::poseidon::testing::in_virtual_time([] { suite##_##name(); }); \
  }                                                                 \
  static void suite##_##name()

/// The same with a fixture, which is made in that world.
#define TEST_F_IN_VIRTUAL_TIME(fixture, name)                              \
  struct fixture##_##name final : fixture {                                \
    static void run() {                                                    \
      fixture##_##name test;                                               \
      test.SetUp();                                                        \
      if (!HasFatalFailure()) test.TestBody();                             \
      test.TearDown();                                                     \
    }                                                                      \
    void TestBody() override;                                              \
  };                                                                       \
  TEST(fixture, name) {                                                    \
    ::poseidon::testing::in_virtual_time([] { fixture##_##name::run(); }); \
  }                                                                        \
  void fixture##_##name::TestBody()

namespace poseidon::testing {

/// The outcome of a function that runs on a thread of its own, in the world of whoever starts it.
template <typename T>
class Beside {
 public:
  explicit Beside(std::function<T()> function)
      : shared_(std::make_shared<Shared>()), thread_("beside", [shared = shared_, run = std::move(function)] {
          shared->outcome.emplace(run());
          shared->done.complete();
        }) {}
  Beside(Beside&&) noexcept = default;
  Beside& operator=(Beside&&) noexcept = default;
  ~Beside() {
    if (thread_.joinable()) thread_.join();
  }

  bool is_done() const { return is_done_after(std::chrono::nanoseconds(0)); }
  bool is_done_after(std::chrono::nanoseconds time) const { return shared_->done.wait_for(time); }
  /// Waits for it. Once only.
  T get() {
    thread_.join();
    return std::move(*shared_->outcome);
  }

 private:
  struct Shared {
    std::optional<T> outcome;
    Completion done = Completion::make();
  };
  std::shared_ptr<Shared> shared_;
  Thread thread_;
};

template <typename Function>
auto run_beside(Function function) {
  return Beside<decltype(function())>(std::move(function));
}

/// A value that one thread gives and another waits for.
template <typename T>
class Awaited {
 public:
  /// Once only.
  void set(T value) {
    value_.emplace(std::move(value));
    done_.complete();
  }
  T get() {
    done_.wait();
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
  const Completion done_ = Completion::make();
};

/// Looks again and again whether something holds, until it does. Returns false if it does not within a minute. What can
/// be waited for by a notification should be.
template <typename Holds>
bool eventually(const Holds& holds, std::chrono::milliseconds pause = std::chrono::milliseconds(2)) {
  const auto latest = Clock::now() + std::chrono::minutes(1);
  while (!holds()) {
    if (Clock::now() >= latest) return false;
    pause_for(pause);
  }
  return true;
}

}  // namespace poseidon::testing
