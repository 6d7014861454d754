// stragglers=drop on a shard: steps that end without late ranks, and the answers to these ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/pace/paced_shard.h"
#include "kernel/kernel.h"
#include "wire/messages/rule.h"

namespace poseidon {
namespace {

/// The fields of the last answer to a rank.
wire::StepResult result_of(const testing::PacedShard& paced, std::uint32_t rank) {
  return wire::StepResult::read(paced.last(rank).header);
}

using testing::absent_of;
using testing::Bytes;
using testing::bytes_of;
using testing::dropping;
using testing::Floats;
using testing::PacedShard;
using testing::values_of;
using testing::with_size;

TEST(ShardStragglers, AStepEndsWithoutARankThatDoesNotCome) {
  PacedShard paced(3, dropping());
  paced.learn();
  ASSERT_TRUE(paced.push(0, 11, {2, 6}).ok());
  paced.time_passes();
  EXPECT_FALSE(paced.answered(0, 11)) << "one of three is not more than half";
  ASSERT_TRUE(paced.push(2, 11, {4, 8}).ok());
  EXPECT_FALSE(paced.answered(0, 11)) << "its time is not over";
  paced.time_passes();
  for (const std::uint32_t rank : {0u, 2u}) {
    ASSERT_TRUE(paced.answered(rank, 11));
    EXPECT_EQ(paced.result(rank), (Floats{3, 7})) << "the mean of two";
    EXPECT_FALSE(result_of(paced, rank).late);
  }
  EXPECT_FALSE(paced.answered(1, 11));
  ASSERT_EQ(paced.shard.pace().late_ranks().size(), 1u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].rank, 1u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].late_steps, 1u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].last_step, 11u);
}

TEST(ShardStragglers, ALateRankGetsTheResultsOneByOneAndWhatItPushedIsDiscarded) {
  PacedShard paced(3, dropping());
  paced.learn();
  std::vector<Bytes> results;
  for (std::uint64_t step = 11; step <= 13; ++step) {
    for (const std::uint32_t rank : {0u, 1u})
      ASSERT_TRUE(paced.push(rank, step, {static_cast<float>(step), 1.0F / static_cast<float>(rank + step)}).ok());
    paced.time_passes();
    ASSERT_TRUE(paced.answered(0, step));
    results.push_back(paced.last(0).payload);
  }
  // Step 14 is open while the late rank goes through 11 to 13.
  ASSERT_TRUE(paced.push(0, 14, {1, 1}).ok());
  for (std::uint64_t step = 11; step <= 13; ++step) {
    ASSERT_TRUE(paced.push(2, step, {1000, 1000}).ok());
    ASSERT_TRUE(paced.answered(2, step));
    EXPECT_EQ(paced.last(2).payload, results[step - 11]);
    EXPECT_TRUE(result_of(paced, 2).late);
    EXPECT_FALSE(result_of(paced, 2).absent);
    EXPECT_EQ(result_of(paced, 2).steps_since, 13 - step);
  }
  ASSERT_TRUE(paced.push(2, 14, {4, 4}).ok());
  ASSERT_TRUE(paced.push(1, 14, {4, 4}).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(paced.answered(rank, 14));
    EXPECT_EQ(paced.result(rank), (Floats{3, 3}));
    EXPECT_FALSE(result_of(paced, rank).late || result_of(paced, rank).absent);
  }
}

TEST(ShardStragglers, WhatIsStillComingIsInNoSum) {
  PacedShard paced(3, dropping());
  const Floats values(1000, 9);
  paced.learn(values);
  const auto place = paced.begin(1, 11, values);
  for (const std::uint32_t rank : {0u, 2u}) ASSERT_TRUE(paced.push(rank, 11, Floats(1000, 4)).ok());
  paced.time_passes();
  ASSERT_TRUE(paced.answered(0, 11));
  EXPECT_EQ(paced.result(0), Floats(1000, 4));
  for (const std::uint32_t rank : {0u, 2u}) ASSERT_TRUE(paced.push(rank, 12, Floats(1000, 6)).ok());
  EXPECT_FALSE(paced.answered(1, 11));
  paced.complete(1, 11, values, place);
  ASSERT_TRUE(paced.answered(1, 11));
  EXPECT_EQ(paced.result(1), Floats(1000, 4));
  ASSERT_TRUE(paced.push(1, 12, Floats(1000, 0)).ok());
  EXPECT_EQ(paced.result(0), Floats(1000, 4)) << "the mean of 6, 6 and 0";
  EXPECT_EQ(paced.last(0).payload, paced.last(1).payload);
}

/// No rank goes on without the result of the step before. One that did could else lose the memory of its late push,
/// which its connection still fills, to its push of the open step.
TEST(ShardStragglers, ALatePushIsRefusedWhileOneOfTheOpenStepIsComing) {
  PacedShard paced(3, dropping());
  const Floats values(1000, 9);
  paced.learn(values);
  for (const std::uint32_t rank : {0u, 2u}) ASSERT_TRUE(paced.push(rank, 11, Floats(1000, 4)).ok());
  paced.time_passes();
  ASSERT_TRUE(paced.answered(0, 11));
  const auto place = paced.begin(1, 12, values);
  const auto late = with_size(paced.header(1, 11), values.size() * sizeof(float));
  const Status refusal = paced.shard.begin(late, paced.workers[1]).status();
  EXPECT_EQ(refusal.code(), ErrorCode::refused);
  EXPECT_NE(refusal.message().find("an earlier push is still arriving"), std::string::npos) << refusal.message();
  for (const std::uint32_t rank : {0u, 2u}) ASSERT_TRUE(paced.push(rank, 12, Floats(1000, 6)).ok());
  paced.time_passes();
  ASSERT_TRUE(paced.answered(0, 12));
  paced.complete(1, 12, values, place);
  ASSERT_TRUE(paced.answered(1, 12));
  EXPECT_EQ(paced.result(1), Floats(1000, 6));
}

TEST(ShardStragglers, ARankThatIsTooFarBehindIsWaitedFor) {
  PacedShard paced(3, dropping(2));
  paced.learn();
  const auto fast = [&](std::uint64_t step) {
    for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, step, {static_cast<float>(step)}).ok());
    paced.time_passes();
  };
  fast(11);
  fast(12);
  fast(13);
  ASSERT_TRUE(paced.answered(0, 12)) << "two steps behind are allowed, three are not";
  paced.time_passes();
  ASSERT_TRUE(paced.answered(0, 12));
  ASSERT_TRUE(paced.push(2, 11, {0}).ok());
  EXPECT_EQ(paced.result(2), Floats{11});
  ASSERT_TRUE(paced.answered(0, 13)) << "its time was over long ago";
  EXPECT_EQ(paced.result(0), Floats{13});
  ASSERT_TRUE(paced.push(2, 12, {0}).ok());
  ASSERT_TRUE(paced.push(2, 13, {0}).ok());
  EXPECT_EQ(paced.result(2), Floats{13});
}

TEST(ShardStragglers, NobodyIsLeftOutWhileItIsLearnt) {
  PacedShard paced(3, dropping());
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 10, {1}).ok());
  paced.time_passes();
  EXPECT_FALSE(paced.answered(0, 10));
  ASSERT_TRUE(paced.push(2, 10, {1}).ok());
  EXPECT_TRUE(paced.answered(0, 10));
}

TEST(ShardStragglers, OfTwoWorkersNobodyIsLeftOut) {
  PacedShard paced(2, dropping());
  paced.learn();
  ASSERT_TRUE(paced.push(0, 11, {1}).ok());
  paced.time_passes();
  EXPECT_FALSE(paced.answered(0, 11));
}

TEST(ShardStragglers, SumsAndTransientStepsWaitForAll) {
  for (const bool transient : {false, true}) {
    PacedShard paced(3, dropping());
    const auto header = [&](std::uint32_t rank) {
      auto one = paced.header(rank, 11);
      one.divisor = transient ? 3 : 1;
      one.transient = transient;
      return one;
    };
    for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(header(rank), Floats{3}).ok());
    paced.time_passes();
    EXPECT_FALSE(paced.answered(0, 11));
    ASSERT_TRUE(paced.push(header(2), Floats{3}).ok());
    EXPECT_EQ(paced.result(0), Floats{transient ? 3.0F : 9.0F});
  }
}

/// The mean over the ranks that were in time: one sum that is divided once.
template <typename T>
std::vector<T> mean_of(const std::vector<std::vector<T>>& inputs, DType dtype, unsigned divisor) {
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) pointers.push_back(std::as_bytes(std::span(input)).data());
  std::vector<T> out(inputs[0].size());
  kernel::sum(pointers, std::as_writable_bytes(std::span(out)).data(), out.size(), dtype, divisor);
  return out;
}

template <typename T>
void expect_exact_mean(DType dtype, const std::function<T(double)>& value_of) {
  constexpr std::uint32_t kRanks = 7;
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 100);
  PacedShard paced(kRanks, dropping());
  const auto header = [&](std::uint32_t rank, std::uint64_t step) {
    auto one = paced.header(rank, step);
    one.dtype = dtype;
    one.divisor = 2 * kRanks;
    return one;
  };
  for (std::uint64_t step = 1; step <= 10; ++step)
    for (std::uint32_t rank = 0; rank < kRanks; ++rank)
      ASSERT_TRUE(paced.push(header(rank, step), std::vector<T>(301)).ok());
  for (const std::vector<std::uint32_t>& late : {std::vector<std::uint32_t>{0}, {6}, {3, 5}, {0, 1, 6}}) {
    const std::uint64_t step = paced.last(0).header.step + 1;
    std::vector<std::vector<T>> in;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      if (std::ranges::find(late, rank) != late.end()) continue;
      auto& values = in.emplace_back(301);
      for (auto& value : values) value = value_of(normal(random));
    }
    std::size_t next = 0;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      if (std::ranges::find(late, rank) != late.end()) continue;
      ASSERT_TRUE(paced.push(header(rank, step), in[next++]).ok());
    }
    paced.time_passes();
    const auto expected = mean_of(in, dtype, 2 * static_cast<unsigned>(in.size()));
    for (const auto rank : late) ASSERT_TRUE(paced.push(header(rank, step), std::vector<T>(301)).ok());
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_TRUE(paced.answered(rank, step));
      EXPECT_EQ(paced.last(rank).payload, bytes_of(expected));
    }
  }
}

TEST(ShardStragglers, TheMeanIsExactlyThatOfThoseWhoWereIn) {
  expect_exact_mean<float>(DType::float32, [](double value) { return static_cast<float>(value); });
  expect_exact_mean<double>(DType::float64, [](double value) { return value; });
  // Any bits that are small numbers: exponent 15 is 1.
  expect_exact_mean<std::uint16_t>(DType::float16, [](double value) {
    return static_cast<std::uint16_t>(0x3C00 + static_cast<int>(std::abs(value)));
  });
}

TEST(ShardStragglers, RanksThatAreInWithoutAGradientCount) {
  PacedShard paced(4, dropping());
  paced.learn();
  ASSERT_TRUE(paced.push(0, 11, {6}).ok());
  ASSERT_TRUE(paced.push(1, 11, {3}).ok());
  ASSERT_TRUE(paced.shard.add(absent_of(paced.header(2, 11)), paced.workers[2], {}, nullptr).ok());
  paced.time_passes();
  EXPECT_EQ(paced.result(2), Floats{3}) << "9 by three";
  // A rank that catches up says so in its push, and the mean does not count it.
  auto catching_up = absent_of(paced.header(3, 12));
  catching_up.excluded_from_mean = true;
  ASSERT_TRUE(paced.shard.add(absent_of(paced.header(3, 11)), paced.workers[3], {}, nullptr).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(paced.push(rank, 12, {6}).ok());
  ASSERT_TRUE(paced.shard.add(catching_up, paced.workers[3], {}, nullptr).ok());
  EXPECT_EQ(paced.result(3), Floats{6});
}

TEST(ShardStragglers, AStepOfAbsentRanksHasNoResult) {
  PacedShard paced(3, dropping());
  paced.learn();
  for (const std::uint32_t rank : {0u, 1u})
    ASSERT_TRUE(paced.shard.add(absent_of(paced.header(rank, 11)), paced.workers[rank], {}, nullptr).ok());
  paced.time_passes();
  ASSERT_TRUE(paced.answered(0, 11));
  EXPECT_TRUE(result_of(paced, 0).absent && !result_of(paced, 0).late);
  ASSERT_TRUE(paced.push(2, 11, {5}).ok());
  EXPECT_TRUE(result_of(paced, 2).absent && result_of(paced, 2).late);
  EXPECT_FALSE(paced.last(2).has_payload);
}

TEST(ShardStragglers, AStepOfAbsentRanksLeavesAStoredValueAndAnswersWithIt) {
  PacedShard paced(3, dropping());
  const auto header = [&](std::uint32_t rank, std::uint64_t step) {
    auto one = paced.header(rank, step);
    one.stored = true;
    return one;
  };
  // Without a rule the value is the last step's mean.
  for (std::uint64_t step = 1; step <= 10; ++step)
    for (std::uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(paced.push(header(rank, step), Floats{9, 4}).ok());
  for (const std::uint32_t rank : {0u, 1u})
    ASSERT_TRUE(paced.shard.add(absent_of(header(rank, 11)), paced.workers[rank], {}, nullptr).ok());
  paced.time_passes();
  ASSERT_TRUE(paced.push(header(2, 11), Floats{5, 5}).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(paced.answered(rank, 11));
    EXPECT_TRUE(result_of(paced, rank).absent) << "there has been no update";
    EXPECT_EQ(paced.result(rank), (Floats{9, 4}));
  }
}

TEST(ShardStragglers, ServersThatUpdateKeepTheValueOfEachStep) {
  PacedShard paced(3, dropping());
  UpdateRule rule = testing::rule_of("sgd", {{"lr", 1}});
  const auto send_rule = [&](std::uint32_t rank, std::uint64_t step) {
    const auto message = wire::Rule{rule}.make(paced.header(rank, step));
    ASSERT_TRUE(paced.shard.set_rule(message.header, message.payload()).ok());
  };
  const auto header = [&](std::uint32_t rank, std::uint64_t step) {
    auto one = paced.header(rank, step);
    one.stored = true;
    return one;
  };
  send_rule(0, 1);
  const wire::Header first = wire::Assign{}.make(paced.header(0, 0));
  const Floats start{100};
  ASSERT_TRUE(paced.shard.assign(with_size(first, 4), std::as_bytes(std::span(start))).ok());
  for (std::uint64_t step = 1; step <= 10; ++step)
    for (std::uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(paced.push(header(rank, step), Floats{0}).ok());
  for (std::uint64_t step = 11; step <= 12; ++step) {
    for (const std::uint32_t rank : {1u, 2u}) ASSERT_TRUE(paced.push(header(rank, step), Floats{1}).ok());
    paced.time_passes();
    EXPECT_EQ(paced.result(1), Floats{100 - static_cast<float>(step - 10)});
  }
  rule = testing::with(rule, "lr", 10);
  send_rule(1, 13);
  rule = testing::with(rule, "lr", 1000);
  send_rule(0, 11);  // of a rank that is behind: too old to hold
  ASSERT_TRUE(paced.push(header(0, 11), Floats{500}).ok());
  EXPECT_EQ(paced.result(0), Floats{99});
  ASSERT_TRUE(paced.push(header(0, 12), Floats{500}).ok());
  EXPECT_EQ(paced.result(0), Floats{98});
  for (std::uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(paced.push(header(rank, 13), Floats{1}).ok());
  EXPECT_EQ(paced.result(0), Floats{88});
}

TEST(ShardStragglers, RefusesWhatTheEndedStepWasNotWaitingFor) {
  PacedShard paced(3, dropping());
  paced.learn();
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 11, {1}).ok());
  paced.time_passes();
  EXPECT_EQ(paced.push(0, 11, {1}).code(), ErrorCode::refused) << "it was in";
  EXPECT_EQ(paced.push(2, 10, {1}).code(), ErrorCode::refused) << "it was in";
  EXPECT_EQ(paced.push(2, 11, {1, 2}).code(), ErrorCode::refused) << "another size";
  EXPECT_EQ(paced.push(2, 13, {1}).code(), ErrorCode::ok) << "the first push of a step says which it is";
  EXPECT_EQ(paced.push(2, 11, {1}).code(), ErrorCode::ok);
  PacedShard waiting(3, wire::Pace());
  auto late = waiting.header(0, 1);
  late.excluded_from_mean = true;
  EXPECT_EQ(waiting.push(late, Floats{1}).code(), ErrorCode::refused);
}

TEST(ShardStragglers, RefusesTheNextStepWhileAnEndedOneIsStillComing) {
  PacedShard paced(3, dropping());
  const Floats values(64, 3);
  paced.learn(values);
  const auto place = paced.begin(2, 11, values);
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 11, values).ok());
  paced.time_passes();
  EXPECT_EQ(paced.push(2, 12, values).code(), ErrorCode::refused);
  EXPECT_EQ(paced.push(2, 11, values).code(), ErrorCode::refused);
  paced.complete(2, 11, values, place);
  EXPECT_TRUE(paced.answered(2, 11));
  EXPECT_TRUE(paced.push(2, 12, values).ok());
}

TEST(ShardStragglers, TheMemoryOfKeptResultsAndLatePartsComesBack) {
  PacedShard paced(3, dropping());
  const Floats values(4096, 1);
  paced.learn(values);
  const auto round = [&](std::uint64_t first) {
    const auto place = paced.begin(2, first, values);
    for (std::uint64_t step = first; step < first + 3; ++step) {
      for (const std::uint32_t rank : {0u, 1u}) {
        ASSERT_TRUE(paced.push(rank, step, values).ok());
        paced.workers[rank].sent.resize(std::min<std::size_t>(paced.workers[rank].sent.size(), 1));
      }
      paced.time_passes();
    }
    paced.complete(2, first, values, place);
    for (std::uint64_t step = first + 1; step < first + 3; ++step) ASSERT_TRUE(paced.push(2, step, values).ok());
  };
  round(11);
  const std::size_t used_bytes = paced.budget->used_bytes();
  for (std::uint64_t first = 14; first < 50; first += 3) round(first);
  EXPECT_EQ(paced.budget->used_bytes(), used_bytes) << "steady training allocates nothing";
}

TEST(ShardStragglers, WithoutRoomForResultsAStepWaits) {
  const Floats values(4096, 1);
  PacedShard roomy(3, dropping());
  roomy.learn(values);
  PacedShard paced(3, dropping(), roomy.budget->used_bytes() + 3 * 4096 * sizeof(float));
  paced.learn(values);
  std::uint64_t step = 11;
  for (; step < 19; ++step) {
    for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, step, values).ok());
    paced.time_passes();
    if (!paced.answered(0, step)) break;
  }
  ASSERT_LT(step, 19u) << "eight steps behind would be allowed";
  for (std::uint64_t late = 11; late <= step; ++late) ASSERT_TRUE(paced.push(2, late, values).ok());
  EXPECT_TRUE(paced.answered(0, step));
  EXPECT_TRUE(paced.answered(2, step));
}

TEST(ShardStragglers, ARankThatGoesTakesItsPartWithIt) {
  PacedShard paced(3, dropping());
  const Floats values(64, 3);
  paced.learn(values);
  // Rank 1 was in time. Without it, no more than half of the ranks are in time.
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(paced.push(rank, 11, values).ok());
  paced.shard.drop(paced.workers[1]);
  paced.time_passes();
  EXPECT_FALSE(paced.answered(0, 11));
  // Its late part was being received.
  static_cast<void>(paced.begin(1, 11, values));
  ASSERT_TRUE(paced.push(2, 11, values).ok());
  paced.time_passes();
  EXPECT_TRUE(paced.answered(0, 11));
  paced.shard.drop(paced.workers[1]);
  for (const std::uint32_t rank : {0u, 2u}) ASSERT_TRUE(paced.push(rank, 12, values).ok());
  paced.time_passes();
  EXPECT_TRUE(paced.answered(0, 12));
}

TEST(ShardStragglers, StepsOfAModelThatIsWrappedLaterCountToo) {
  PacedShard paced(4, dropping());
  const auto make_steps = [&](std::uint32_t unit, std::uint64_t last) {
    for (std::uint64_t step = 1; step <= last; ++step) {
      for (const std::uint32_t rank : {0u, 1u, 2u, 3u}) {
        if (rank == 3 && step > 10) paced.time_passes();
        auto header = paced.header(rank, step);
        header.unit = unit;
        ASSERT_TRUE(paced.push(header, Floats{1}).ok());
      }
    }
  };
  make_steps(0, 12);
  make_steps(1, 40);
  make_steps(2, 31);
  EXPECT_EQ(paced.noticed, std::vector<std::uint32_t>{3});
  ASSERT_EQ(paced.shard.pace().late_ranks().size(), 1u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].late_steps, 30u) << "of the second model";
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].late_chunks, 2u + 30 + 21);
}

TEST(ShardStragglers, TellsOnceOfARankThatIsOftenLate) {
  PacedShard paced(4, dropping());
  paced.learn();
  for (std::uint64_t step = 11; step <= 60; ++step) {
    for (const std::uint32_t rank : {0u, 1u, 2u}) ASSERT_TRUE(paced.push(rank, step, {1}).ok());
    if (step % 5 == 0 || step % 20 == 1) paced.time_passes();
    ASSERT_TRUE(paced.push(3, step, {1}).ok());
  }
  EXPECT_EQ(paced.noticed, std::vector<std::uint32_t>{3});
  ASSERT_EQ(paced.shard.pace().late_ranks().size(), 1u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].late_steps, 12u);
  EXPECT_EQ(paced.shard.pace().late_ranks()[0].late_chunks, 12u);
}

}  // namespace
}  // namespace poseidon
