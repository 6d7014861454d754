// A job that was stopped for longer than its timeout goes on.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/client/child_rank.h"
#include "cpp/client/cluster.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kElements = 4'000'000;  // more than sockets hold, so that a pause finds bytes on their way
constexpr std::uint32_t kLayer = 1;           // the check of the plan is the first

/// What the ranks tell the test.
struct Told {
  std::array<std::atomic<int>, 2> steps;
  std::array<std::atomic<bool>, 2> failed;
  std::array<std::array<char, 500>, 2> why;
};

Told* shared_memory() {
  void* const memory = ::mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) Told{};
}

/// Exchanges until one fails.
void train(Client& client, std::size_t rank, Told& told) {
  std::vector<float> gradient(kElements, 1.0f);
  Status status;
  while (status.ok()) {
    status = client.start(kLayer, bytes_of(gradient), 2);
    if (status.ok()) status = client.wait_all(always);
    if (status.ok()) ++told.steps[rank];
  }
  status.message().copy(told.why[rank].data(), told.why[rank].size() - 1);
  told.failed[rank] = true;
}

/// Processes are stopped by the kernel, and for the kernel's time.
void let_pass(milliseconds time) { std::this_thread::sleep_for(time); }

int wait_for_step(const Told& told, std::size_t rank, int step) {
  const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  static_cast<void>(eventually(
      [&] { return told.steps[rank] >= step || told.failed[rank] || std::chrono::steady_clock::now() >= latest; }));
  return told.steps[rank];
}

class Suspended : public ::testing::TestWithParam<Medium> {};

TEST_P(Suspended, AJobGoesOn) {
  Told& told = *shared_memory();
  auto all = cluster_options(2, milliseconds(2'500));
  for (auto& options : all) options.transport = GetParam();
  const std::vector<Layer> layers{vector_layer("weights", kElements)};
  const ChildRank first(all[0], layers, [&](Client& client) { train(client, 0, told); });
  const ChildRank second(all[1], layers, [&](Client& client) { train(client, 1, told); });
  ASSERT_GE(wait_for_step(told, 0, 3), 3);
  first.stop();
  let_pass(milliseconds(300));
  second.stop();
  let_pass(milliseconds(5'000));
  first.go_on();
  let_pass(milliseconds(300));
  second.go_on();
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_GE(wait_for_step(told, rank, told.steps[rank] + 5), 8) << rank;
    EXPECT_FALSE(told.failed[rank]) << told.why[rank].data();
  }
}

INSTANTIATE_TEST_SUITE_P(Media, Suspended, ::testing::Values(Medium::tcp, Medium::shm));

TEST(Clock, GoesOnHoweverSoonItsThreadEnds) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int round = 0; round < 300; ++round) {
        const KeepsTime keeps_time;
        const KeepsTime another;
      }
    });
  for (auto& thread : threads) thread.join();
  const auto begun = Clock::now();
  let_pass(milliseconds(1'500));
  EXPECT_GE(Clock::now() - begun, milliseconds(1'500));
}

TEST(Clock, LeavesOutTheTimeInWhichTheProcessWasStopped) {
  struct Times {
    std::atomic<std::int64_t> active_ns{0};
    std::atomic<std::int64_t> true_ns{0};
    std::atomic<std::int64_t> ran_ns{0};
  };
  void* const memory = ::mmap(nullptr, sizeof(Times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Times& times = *new (memory) Times;
  const pid_t child = ::fork();
  if (child == 0) {
    const KeepsTime keeps_time;
    const auto begun = Clock::now();
    const std::int64_t begun_ns = now_ns();
    for (;;) {
      times.active_ns = (Clock::now() - begun).count();
      times.ran_ns = now_ns() - ran_since_ns(std::chrono::seconds(1));
      times.true_ns = now_ns() - begun_ns;
      let_pass(milliseconds(1));
    }
  }
  const auto wait_for_time = [&](std::int64_t least_ns) {
    ASSERT_TRUE(eventually([&] { return times.true_ns >= least_ns; }));
  };
  wait_for_time(200'000'000);
  ::kill(child, SIGSTOP);
  let_pass(milliseconds(3'000));
  ::kill(child, SIGCONT);
  wait_for_time(3'600'000'000);
  EXPECT_LT(times.active_ns, times.true_ns - 1'500'000'000);
  EXPECT_GT(times.active_ns, 500'000'000);
  EXPECT_GT(times.ran_ns, 2'500'000'000);  // a second in which it ran began before the pause
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace poseidon::testing
