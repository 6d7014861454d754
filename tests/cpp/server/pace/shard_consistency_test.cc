// consistency=ssp and async on a shard: pushes are applied one by one.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/pace/paced_shard.h"
#include "kernel/kernel.h"
#include "wire/messages/rule.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::asynchronous;
using testing::Floats;
using testing::PacedShard;
using testing::stale;
using testing::with_size;

/// A paced shard with a stored chunk and a rule.
struct Stored : PacedShard {
  Stored(std::uint32_t worker_count, const wire::Pace& pace, const Floats& start) : PacedShard(worker_count, pace) {
    const wire::Header first = wire::Assign{}.make(header(0, 0));
    EXPECT_TRUE(shard.assign(with_size(first, start.size() * sizeof(float)), std::as_bytes(std::span(start))).ok());
    for (std::uint32_t rank = 0; rank < worker_count; ++rank) send_rule(rank);
  }
  void send_rule(std::uint32_t rank) {
    const auto message = wire::Rule{rule}.make(header(rank, 1));
    EXPECT_TRUE(shard.set_rule(message.header, message.payload()).ok());
  }
  wire::Contribution stored(std::uint32_t rank, std::uint64_t step) const {
    auto one = header(rank, step);
    one.stored = true;
    return one;
  }
  Status push(std::uint32_t rank, std::uint64_t step, const Floats& values) {
    return PacedShard::push(stored(rank, step), values);
  }

  UpdateRule rule = testing::rule_of("sgd", {{"lr", 0.5}});
};

TEST(ShardConsistency, AsyncAppliesEachPushAsItComes) {
  constexpr std::size_t kCount = 333;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 3);
  Floats value(kCount);
  for (auto& element : value) element = normal(random);
  Stored paced(3, asynchronous(), value);
  paced.rule = testing::with(paced.rule, "momentum", 0.9);
  for (std::uint32_t rank = 0; rank < 3; ++rank) paced.send_rule(rank);
  Floats momentum(kCount, 0);
  std::vector<std::uint64_t> steps(3, 0);
  for (std::uint64_t update = 1; update <= 30; ++update) {
    const auto rank = static_cast<std::uint32_t>(update <= 5 ? 2 : random() % 3);
    Floats gradient(kCount);
    for (auto& element : gradient) element = normal(random);
    const std::uint64_t step = ++steps[rank];
    if (random() % 2 == 0) {
      ASSERT_TRUE(paced.push(rank, step, gradient).ok());
    } else {
      auto place = paced.shard.begin(with_size(paced.stored(rank, step), kCount * sizeof(float)), paced.workers[rank]);
      ASSERT_TRUE(place.ok());
      std::memcpy(place.value().data(), gradient.data(), place.value().size());
      paced.shard.complete(with_size(paced.stored(rank, step), kCount * sizeof(float)));
    }
    for (auto& element : gradient) element /= 3;
    UpdateCall<float> call;
    call.parameters = value;
    call.gradient = gradient;
    call.states[0] = momentum;
    call.update_count = update;
    call.values = paced.rule.values;
    paced.rule.kind->update_float32(call);
    ASSERT_TRUE(paced.answered(rank, step));
    ASSERT_EQ(paced.result(rank), value) << "update " << update;
    EXPECT_EQ(wire::StepResult::read(paced.last(rank).header).absent, false);
    EXPECT_EQ(wire::StepResult::read(paced.last(rank).header).late, false);
  }
}

TEST(ShardConsistency, SspAnswersWhenNobodyIsTooFarBehind) {
  Stored paced(3, stale(1), {0});
  ASSERT_TRUE(paced.push(0, 1, {-6}).ok());
  ASSERT_TRUE(paced.answered(0, 1)) << "step 1 may be one ahead of 0";
  EXPECT_EQ(paced.result(0), Floats{1});
  ASSERT_TRUE(paced.push(0, 2, {-6}).ok());
  ASSERT_TRUE(paced.push(1, 1, {-6}).ok());
  ASSERT_TRUE(paced.push(1, 2, {-6}).ok());
  EXPECT_FALSE(paced.answered(0, 2));
  EXPECT_FALSE(paced.answered(1, 2));
  ASSERT_EQ(paced.shard.open_chunks(INT64_MAX).size(), 2u);
  EXPECT_EQ(paced.shard.open_chunks(INT64_MAX)[0].missing_ranks, std::vector<std::uint32_t>{2});
  ASSERT_TRUE(paced.push(2, 1, {-6}).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(paced.answered(rank, rank == 2 ? 1 : 2));
    EXPECT_EQ(paced.result(rank), Floats{5}) << "all five pushes, whenever they were made";
  }
  EXPECT_TRUE(paced.shard.open_chunks(INT64_MAX).empty());
}

TEST(ShardConsistency, AnAbsentPushAdvancesTheClockAlone) {
  Stored paced(2, stale(0), {4});
  ASSERT_TRUE(paced.push(0, 1, {4}).ok());
  EXPECT_FALSE(paced.answered(0, 1));
  ASSERT_TRUE(paced.shard.add(absent_of(paced.stored(1, 1)), paced.workers[1], {}, nullptr).ok());
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(paced.answered(rank, 1));
    EXPECT_EQ(paced.result(rank), Floats{3});
  }
}

TEST(ShardConsistency, ARanksPushFollowsTheRuleThatItHasSent) {
  Stored paced(2, asynchronous(), {0});
  paced.rule = testing::with(paced.rule, "lr", 50);
  paced.send_rule(1);
  ASSERT_TRUE(paced.push(0, 1, {-4}).ok());
  EXPECT_EQ(paced.result(0), Floats{1});
  ASSERT_TRUE(paced.push(1, 1, {-4}).ok());
  EXPECT_EQ(paced.result(1), Floats{101});
}

TEST(ShardConsistency, RefusesPushesWithoutARuleOutOfOrderOrOfAnotherSize) {
  Stored paced(2, asynchronous(), {0});
  EXPECT_EQ(paced.push(0, 2, {1}).code(), ErrorCode::refused) << "its first step is 1";
  ASSERT_TRUE(paced.push(0, 1, {1}).ok());
  EXPECT_EQ(paced.push(0, 1, {1}).code(), ErrorCode::refused);
  ASSERT_TRUE(paced.push(0, 2, {1, 2}).ok());  // as far as its header says
  ASSERT_EQ(paced.workers[0].refusals.size(), 1u);
  EXPECT_FALSE(paced.answered(0, 2));
  Stored waiting(2, stale(0), {0});
  ASSERT_TRUE(waiting.push(0, 1, {1}).ok());
  EXPECT_EQ(waiting.push(0, 2, {1}).code(), ErrorCode::refused) << "step 1 has not been answered";
  PacedShard bare(2, asynchronous());
  auto stored = bare.header(0, 1);
  stored.stored = true;
  EXPECT_EQ(bare.push(stored, Floats{1}).code(), ErrorCode::refused) << "no rule";
  EXPECT_TRUE(bare.shard.open_chunks(INT64_MAX).empty());
}

TEST(ShardConsistency, LayersThatAreNotStoredWaitForAll) {
  PacedShard paced(2, asynchronous());
  ASSERT_TRUE(paced.push(0, 1, {2}).ok());
  EXPECT_FALSE(paced.answered(0, 1));
  ASSERT_TRUE(paced.push(1, 1, {4}).ok());
  EXPECT_EQ(paced.result(0), Floats{3});
}

TEST(ShardConsistency, WhoGoesIsNotAnswered) {
  Stored paced(2, stale(0), {0});
  ASSERT_TRUE(paced.push(0, 1, {1}).ok());
  paced.shard.drop(paced.workers[0]);
  ASSERT_TRUE(paced.push(1, 1, {1}).ok());
  EXPECT_TRUE(paced.workers[0].sent.empty());
  EXPECT_TRUE(paced.answered(1, 1));
}

}  // namespace
}  // namespace poseidon
