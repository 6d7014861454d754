// stragglers=drop on a shard. If there is no room for the results that are kept for late ranks, a step waits, and no
// push is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/pace/paced_shard.h"
#include "kernel/kernel.h"
#include "simulation/virtual_time.h"
#include "wire/messages/rule.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::dropping;
using testing::Floats;
using testing::PacedShard;
using testing::with_size;

constexpr std::uint32_t kRanks = 3;
constexpr std::uint32_t kLateRank = 2;
constexpr std::uint32_t kChunks = 2;
constexpr std::uint64_t kSteps = 30;
constexpr std::size_t kBytes = 16'384;  // of a chunk

/// Three ranks that push two chunks at once, received as from a network, with as much memory as `memory_limit`.
class LimitedRun {
 public:
  LimitedRun(const UpdateRule& rule, std::size_t memory_limit)
      : paced_(kRanks, dropping(), memory_limit), rule_(rule) {}

  /// Returns false if there is no room for steps that wait for all ranks.
  bool learn() {
    if (rule_.kind != nullptr && !store_parameters()) return false;
    for (std::uint64_t step = 1; step <= 10; ++step)
      if (!push({0, 1, kLateRank}, step) || refused()) return false;
    return true;
  }
  /// Steps in which rank 2 is late. It catches up when the others wait for it, and at the end.
  void run_late() {
    std::uint64_t late_step = 11;
    for (std::uint64_t step = 11; step <= kSteps; ++step) {
      ASSERT_TRUE(push({0, 1}, step)) << "step " << step;
      paced_.time_passes();
      if (!waits(step)) ++dropped_steps;
      for (; waits(step); ++late_step) ASSERT_TRUE(push({kLateRank}, late_step)) << "step " << late_step;
    }
    for (; late_step <= kSteps; ++late_step) ASSERT_TRUE(push({kLateRank}, late_step));
    EXPECT_FALSE(refused());
    for (const auto& worker : paced_.workers) EXPECT_EQ(worker.sent.size(), kSteps * kChunks);
  }

  std::uint64_t dropped_steps = 0;

 private:
  wire::Contribution header(std::uint32_t rank, std::uint64_t step, std::uint32_t chunk) const {
    wire::Contribution header = with_size(paced_.header(rank, step), kBytes);
    header.chunk = chunk;
    header.stored = rule_.kind != nullptr;
    return header;
  }
  bool store_parameters() {
    const auto message = wire::Rule{rule_}.make(paced_.header(0, 1));
    if (!paced_.shard.set_rule(message.header, message.payload()).ok()) return false;
    const Floats start(kBytes / sizeof(float), 1);
    for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const wire::Header assign = wire::Assign{}.make(header(0, 0, chunk));
      if (!paced_.shard.assign(assign, std::as_bytes(std::span(start))).ok()) return false;
    }
    return true;
  }
  /// All headers come first, then the payloads.
  bool push(const std::vector<std::uint32_t>& ranks, std::uint64_t step) {
    std::vector<wire::Contribution> begun;
    for (const auto rank : ranks) {
      for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        begun.push_back(header(rank, step, chunk));
        auto place = paced_.shard.begin(begun.back(), paced_.workers[rank]);
        if (!place.ok()) return false;
        std::ranges::fill(place.value(), std::byte{0});
      }
    }
    for (const wire::Contribution& one : begun) paced_.shard.complete(one);
    return true;
  }
  bool waits(std::uint64_t step) const { return paced_.workers[0].sent.size() < step * kChunks; }
  bool refused() const {
    return std::ranges::any_of(paced_.workers, [](const auto& worker) { return !worker.refusals.empty(); });
  }

  PacedShard paced_;
  const UpdateRule rule_;
};

class StragglersMemory : public ::testing::TestWithParam<std::string> {};

TEST_P(StragglersMemory, WhereStepsThatWaitHaveRoomNothingIsRefusedWithLateRanks) {
  const UpdateRule rule = GetParam() == "none" ? UpdateRule() : testing::rule_of(GetParam(), {{"lr", 0.1}});
  std::vector<std::uint64_t> dropped_steps;  // by limit
  for (std::size_t limit_bytes = 4 * kBytes; limit_bytes < 50 * kBytes; limit_bytes += kBytes / 4) {
    SCOPED_TRACE("limit of " + std::to_string(limit_bytes));
    LimitedRun run(rule, limit_bytes);
    if (!run.learn()) continue;
    run.run_late();
    if (HasFailure()) return;
    dropped_steps.push_back(run.dropped_steps);
  }
  ASSERT_FALSE(dropped_steps.empty());
  EXPECT_EQ(dropped_steps.front(), 0u) << "no room for a single result";
  EXPECT_EQ(dropped_steps.back(), 8u) << "room for those of eight steps";
  EXPECT_TRUE(std::ranges::is_sorted(dropped_steps)) << "more memory, fewer steps that wait";
}

INSTANTIATE_TEST_SUITE_P(Rules, StragglersMemory, ::testing::Values("none", "sgd", "adam", "lamb"));

TEST(StragglersMemory, WhatTellsOfStepsWithoutAResultIsCharged) {
  PacedShard paced(3, dropping(64));
  paced.learn();
  const auto push_absent = [&](std::uint32_t rank, std::uint64_t step) {
    ASSERT_TRUE(paced.shard.add(absent_of(paced.header(rank, step)), paced.workers[rank], {}, nullptr).ok());
  };
  const std::size_t before_bytes = paced.budget->used_bytes();
  for (std::uint64_t step = 11; step < 11 + 64; ++step) {
    for (const std::uint32_t rank : {0u, 1u}) push_absent(rank, step);
    paced.time_passes();
    ASSERT_TRUE(paced.answered(0, step));
  }
  EXPECT_GE(paced.budget->used_bytes(), before_bytes + 64 * sizeof(wire::Header));
  for (std::uint64_t step = 11; step < 11 + 64; ++step) push_absent(2, step);
  EXPECT_EQ(paced.budget->used_bytes(), before_bytes);
}

TEST(StragglersDeadline, IsThatOfTheLastRankThatMadeMoreThanHalf) {
  PacedShard paced(3, dropping());
  paced.learn();
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 11, {1}).ok());
  paced.time_passes();
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 12, {1}).ok());
  paced.shard.drop(paced.workers[1]);
  paced.time_passes();
  paced.shard.drop(paced.workers[0]);
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 12, {1}).ok());
  paced.shard.pace().end_late_steps(now_ns());
  ASSERT_TRUE(paced.push(2, 11, {1}).ok());  // what might have been waited for
  EXPECT_FALSE(paced.answered(0, 12)) << "only the time of those that have gone is over";
  paced.time_passes();
  EXPECT_TRUE(paced.answered(0, 12));
}

TEST(StragglersDeadline, TheLoopKeepsThemAll) {
  Loop loop("deadlines");
  std::array<testing::RecordingRequester, 3> workers;
  const auto budget = std::make_shared<MemoryBudget>(0);
  const auto shard = std::make_unique<Shard>(3, Reduction{}, ShardThreads{}, budget);
  shard->set_pace(dropping(), &loop, nullptr);
  const auto push = [&](std::uint32_t rank, std::uint64_t step, std::uint32_t chunk) {
    loop.call([&] {
      wire::Contribution header = absent_of(testing::push_of(rank, 3, step));
      header.divisor = 3;
      header.chunk = chunk;
      ASSERT_TRUE(shard->add(header, workers[rank], {}, nullptr).ok());
    });
  };
  constexpr std::uint32_t kOpen = 4;
  for (std::uint32_t chunk = 0; chunk < kOpen; ++chunk) {
    for (std::uint64_t step = 1; step <= 10; ++step)
      for (std::uint32_t rank = 0; rank < 3; ++rank) push(rank, step, chunk);
    for (const std::uint32_t rank : {0u, 1u}) push(rank, 11, chunk);
  }
  const auto answered = [&] {
    std::size_t count = 0;
    loop.call([&] { count = workers[0].sent.size(); });
    return count;
  };
  EXPECT_TRUE(testing::eventually([&] { return answered() >= kOpen * 11; }));
  EXPECT_EQ(answered(), kOpen * 11);
  loop.stop();
}

}  // namespace
}  // namespace poseidon
