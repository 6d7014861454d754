// The values that a shard keeps between steps, the state of their updates, and the answers to pulls.
#include "server/chunk/stored_chunk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/contributions.h"
#include "cpp/server/chunk/reference_update.h"
#include "kernel/kernel.h"
#include "server/core/shard.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"

namespace poseidon {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::Floats;
using testing::header_of;
using testing::random_reals;
using testing::RecordingRequester;
using testing::ReferenceParameters;
using testing::stored_push_of;
using testing::update_rules;
using testing::values_of;

Bytes copy_of(const std::shared_ptr<const Buffer>& array) {
  return array ? Bytes(array->span().begin(), array->span().end()) : Bytes{};
}

Buffer buffer_of(const Bytes& bytes) {
  Buffer buffer(bytes.size());
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
  return buffer;
}

class StoredChunkTest : public ::testing::Test {
 protected:
  Status assign(std::size_t array, const Floats& values, std::uint64_t update_count = 0) {
    return chunk_.assign(array, std::as_bytes(std::span(values)), DType::float32, update_count);
  }
  static void expect_refused(const Status& status, const std::string& word) {
    EXPECT_EQ(status.code(), ErrorCode::refused) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  }

  Buffer sum_of(const Floats& values) {
    Buffer sum = pool_->take(values.size() * sizeof(float));
    std::ranges::copy(std::as_bytes(std::span(values)), sum.span().begin());
    return sum;
  }

  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  StoredChunk chunk_{pool_};
};

TEST_F(StoredChunkTest, HasNothingBeforeItsFirstValue) {
  EXPECT_FALSE(chunk_.has_value());
  EXPECT_EQ(chunk_.array(0), nullptr);
  expect_refused(assign(1, {1}), "before its states");
  expect_refused(assign(kGradientArray, {1}), "array 5");
  expect_refused(chunk_.update(update_rules()[0], Buffer(8), DType::float32), "before the first update");
  EXPECT_FALSE(chunk_.has_value());
}

TEST_F(StoredChunkTest, StatesFitTheValueAndANewValueForgetsThem) {
  ASSERT_TRUE(assign(0, {1, 2}, 7).ok());
  EXPECT_EQ(chunk_.update_count(), 7u);
  expect_refused(assign(1, {1, 2, 3}), "12 bytes");
  const std::vector<double> wide{1};
  expect_refused(chunk_.assign(1, std::as_bytes(std::span(wide)), DType::float64, 0), "state");
  ASSERT_TRUE(assign(2, {5, 6}, 8).ok());
  EXPECT_EQ(chunk_.update_count(), 8u);
  EXPECT_EQ(values_of(chunk_.array(0)->span()), (Floats{1, 2}));
  EXPECT_EQ(values_of(chunk_.array(1)->span()), (Floats{0, 0})) << "no update has made it yet";
  EXPECT_EQ(values_of(chunk_.array(2)->span()), (Floats{5, 6}));
  EXPECT_EQ(chunk_.array(kGradientArray + 1), nullptr);
  ASSERT_TRUE(assign(0, {3, 4, 5}).ok());
  EXPECT_EQ(values_of(chunk_.array(2)->span()), (Floats{0, 0, 0}));
  EXPECT_EQ(chunk_.update_count(), 0u);
}

TEST_F(StoredChunkTest, RefusesGradientsThatDoNotFitAndKeepsItsValue) {
  ASSERT_TRUE(assign(0, {1, 2}).ok());
  const UpdateRule rule = update_rules()[3];
  expect_refused(chunk_.update(rule, Buffer(4), DType::float32), "4 bytes");
  expect_refused(chunk_.update(rule, Buffer(8), DType::float64), "gradient");
  EXPECT_EQ(chunk_.update_count(), 0u);
  EXPECT_EQ(values_of(chunk_.array(0)->span()), (Floats{1, 2}));
  const std::vector<std::uint16_t> halves(2);
  ASSERT_TRUE(chunk_.assign(0, std::as_bytes(std::span(halves)), DType::bfloat16, 0).ok());
  expect_refused(chunk_.update(rule, Buffer(4), DType::bfloat16), "bfloat16");
}

TEST_F(StoredChunkTest, UpdatesAsTheKernelDoesAndWhatWasHandedOutKeepsItsBytes) {
  std::mt19937 random(5);
  for (const DType dtype : {DType::float32, DType::float64}) {
    for (const UpdateRule& rule : update_rules()) {
      ReferenceParameters reference(random_reals(random, dtype, 1003), dtype);
      StoredChunk chunk(std::make_shared<BufferPool>());
      ASSERT_TRUE(chunk.assign(0, reference.value, dtype, 0).ok());
      std::vector<std::pair<std::shared_ptr<const Buffer>, Bytes>> handed_out;
      for (int step = 0; step < 6; ++step) {
        const Bytes gradient = random_reals(random, dtype, 1003);
        reference.update(rule, gradient);
        ASSERT_TRUE(chunk.update(rule, buffer_of(gradient), dtype).ok());
        ASSERT_EQ(copy_of(chunk.array(0)), reference.value) << "kind " << rule.kind->name;
        for (std::size_t i = 0; i < reference.states.size(); ++i)
          ASSERT_EQ(copy_of(chunk.array(i + 1)), reference.states[i]);
        EXPECT_EQ(chunk.update_count(), reference.update_count);
        if (step % 2 == 1) continue;  // in the others, nobody holds the arrays
        for (std::size_t i = 0; i <= reference.states.size(); ++i)
          handed_out.emplace_back(chunk.array(i), copy_of(chunk.array(i)));
      }
      for (const auto& [array, bytes] : handed_out) EXPECT_EQ(copy_of(array), bytes);
    }
  }
}

TEST_F(StoredChunkTest, WithoutARuleTheSumIsTheValue) {
  chunk_.replace(sum_of({1, 2}), DType::float32);
  const auto first = chunk_.array(0);
  chunk_.replace(sum_of({3, 4}), DType::float32);
  EXPECT_EQ(values_of(first->span()), (Floats{1, 2}));
  EXPECT_EQ(values_of(chunk_.array(0)->span()), (Floats{3, 4}));
}

TEST_F(StoredChunkTest, ARuleOfAnotherKindBeginsAnewAndOneOfTheSameKindGoesOn) {
  const UpdateRule momentum = make_update_rule("sgd", {{"lr", 0.5}, {"momentum", 0.5}}).value();
  const UpdateRule slower = testing::with(momentum, "lr", 0.25);
  const UpdateRule adam = make_update_rule("adam").value();
  const Bytes gradient = bytes_of(Floats{1, -2});
  const auto update = [&](const UpdateRule& rule, ReferenceParameters& expected) {
    ASSERT_TRUE(chunk_.update(rule, buffer_of(gradient), DType::float32).ok());
    expected.update(rule, gradient);
    EXPECT_EQ(copy_of(chunk_.array(0)), expected.value);
    EXPECT_EQ(copy_of(chunk_.array(1)), expected.states[0]);
    EXPECT_EQ(chunk_.update_count(), expected.update_count);
  };
  ASSERT_TRUE(assign(0, {3, 4}).ok());
  ReferenceParameters first(copy_of(chunk_.array(0)), DType::float32);
  for (const UpdateRule& rule : {momentum, momentum, slower}) update(rule, first);
  ReferenceParameters second(first.value, DType::float32);
  for (int i = 0; i < 2; ++i) update(adam, second);
  chunk_.replace(sum_of({1, -2}), DType::float32);
  EXPECT_EQ(chunk_.update_count(), 0u);
  ReferenceParameters third(gradient, DType::float32);
  for (int i = 0; i < 2; ++i) update(adam, third);
  chunk_.set_states_of(momentum.kind);
  ReferenceParameters fourth(third.value, DType::float32);
  update(adam, fourth);
}

/// The same cases through the messages of a shard.
class StoredShard : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kWorkers = 2;

  Status push(std::uint32_t rank, std::uint64_t step, const Bytes& gradient, DType dtype = DType::float32,
              bool wants_result = true) {
    wire::Contribution header = stored_push_of(rank, kWorkers, step);
    header.dtype = dtype;
    header.divisor = 2;
    header.wants_result = wants_result;
    header.payload_bytes = gradient.size();
    lent_.push_back(gradient);
    return shard_.add(header, workers_[rank], lent_.back(), [] {});
  }
  void push_all(std::uint64_t step, const Bytes& gradient, DType dtype = DType::float32) {
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) ASSERT_TRUE(push(rank, step, gradient, dtype).ok());
  }
  Status assign(const Bytes& values, std::uint32_t array = 0, std::uint64_t update_count = 0,
                DType dtype = DType::float32) {
    return shard_.assign(wire::Assign{dtype, array, update_count}.make({}), values);
  }
  void pull(std::uint32_t rank, std::uint32_t array = 0) {
    const wire::Header header = wire::Pull{array}.make(header_of(wire::Kind::pull, rank, kWorkers));
    ASSERT_TRUE(shard_.pull(header, workers_[rank]).ok());
  }
  void set_rule(const UpdateRule& rule) {
    const auto message = wire::Rule{rule}.make(header_of(wire::Kind::rule, 0, kWorkers));
    ASSERT_TRUE(shard_.set_rule(message.header, message.payload()).ok());
  }
  const RecordingRequester::Sent& last(std::uint32_t rank) { return workers_[rank].sent.back(); }

  std::deque<Bytes> lent_;
  std::vector<RecordingRequester> workers_{kWorkers};
  Shard shard_{kWorkers, {}, {}};
};

TEST_F(StoredShard, APullWaitsForTheFirstValue) {
  pull(0);
  pull(1);
  EXPECT_TRUE(workers_[0].sent.empty());
  shard_.drop(workers_[1]);
  ASSERT_TRUE(assign(bytes_of(Floats{1, 2}), 0, 41).ok());
  ASSERT_EQ(workers_[0].sent.size(), 1u);
  EXPECT_EQ(last(0).header.kind, wire::Kind::value);
  EXPECT_EQ(wire::Value::read(last(0).header).update_count, 41u);
  EXPECT_EQ(last(0).header.rank, 0u);
  EXPECT_EQ(values_of(last(0).payload), (Floats{1, 2}));
  EXPECT_TRUE(workers_[1].sent.empty()) << "it has gone";
  pull(1);
  EXPECT_EQ(values_of(last(1).payload), (Floats{1, 2}));
}

TEST_F(StoredShard, AStepThatEndsAnswersThePullsToo) {
  pull(0);
  push_all(1, bytes_of(Floats{2, 4}));
  ASSERT_EQ(workers_[0].sent.size(), 2u);
  for (const auto& sent : workers_[0].sent) EXPECT_EQ(values_of(sent.payload), (Floats{2, 4}));
  pull(1);
  EXPECT_EQ(values_of(last(1).payload), (Floats{2, 4})) << "the last reduced gradient";
}

TEST_F(StoredShard, OnlyArraysThatExistArePulled) {
  ASSERT_TRUE(assign(bytes_of(Floats{1})).ok());
  pull(0, 2);
  EXPECT_EQ(values_of(last(0).payload), Floats{0});
  EXPECT_EQ(wire::Value::read(last(0).header).array, 2u);
  pull(0, kGradientArray);
  pull(0, kGradientArray + 1);
  ASSERT_EQ(workers_[0].refusals.size(), 2u);
  EXPECT_NE(workers_[0].refusals[0].message().find("has kept no gradient"), std::string::npos);
  EXPECT_NE(workers_[0].refusals[1].message().find("array 6"), std::string::npos);
}

TEST_F(StoredShard, TheMeanGradientIsThereUntilTheNextUpdate) {
  for (auto& worker : workers_) worker.keep = true;
  ASSERT_TRUE(assign(bytes_of(Floats{5, 6})).ok());
  UpdateRule rule = update_rules()[0];
  rule.keeps_gradient = true;
  set_rule(rule);
  ASSERT_TRUE(push(0, 1, bytes_of(Floats{1, 2})).ok());
  ASSERT_TRUE(push(1, 1, bytes_of(Floats{3, 8})).ok());
  pull(1, kGradientArray);
  EXPECT_EQ(values_of(last(1).payload), (Floats{2, 5}));
  ASSERT_TRUE(assign(bytes_of(Floats{7, 8})).ok());
  ASSERT_TRUE(push(1, 2, bytes_of(Floats{9, 9})).ok()) << "of a worker that is ahead";
  pull(0, kGradientArray);
  EXPECT_EQ(values_of(last(0).payload), (Floats{2, 5}));
  ASSERT_TRUE(push(0, 2, bytes_of(Floats{1, 1})).ok());
  EXPECT_EQ(values_of(copy_of(workers_[1].sent[1].kept)), (Floats{2, 5})) << "what was handed out stays as it was";
  pull(0, kGradientArray);
  EXPECT_EQ(values_of(last(0).payload), (Floats{5, 5}));
  rule.keeps_gradient = false;
  set_rule(rule);
  push_all(3, bytes_of(Floats{1, 1}));
  pull(0, kGradientArray);
  ASSERT_EQ(workers_[0].refusals.size(), 1u);
}

wire::Contribution rounded_push(std::uint32_t rank, DType dtype, const Bytes& gradient) {
  wire::Contribution push = stored_push_of(rank, 2);
  push.dtype = dtype;
  push.divisor = 2;
  push.payload_bytes = gradient.size();
  push.float32_value = true;
  return push;
}

Bytes encoded(DType dtype, const Floats& values) {
  Bytes bytes(array_bytes(dtype, values.size()));
  kernel::encode(dtype, values.data(), bytes.data(), values.size());
  return bytes;
}

TEST_F(StoredShard, SumsRoundedGradientsInFloat32AndUpdatesWithoutRoundingTheSum) {
  constexpr std::size_t kCount = 300;  // the second block of 8-bit values is not full
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::int8_blocks}) {
    Shard shard(kWorkers, {}, {});
    std::vector<RecordingRequester> workers(kWorkers);
    ASSERT_TRUE(shard.assign(wire::Assign{}.make({}), bytes_of(Floats(kCount, 0.0F))).ok());
    UpdateRule rule = make_update_rule("sgd", {{"lr", 1}}).value();
    rule.keeps_gradient = true;
    const auto message = wire::Rule{rule}.make(header_of(wire::Kind::rule, 0, kWorkers));
    ASSERT_TRUE(shard.set_rule(message.header, message.payload()).ok());
    Floats expected(kCount);
    std::vector<Bytes> gradients;
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      Floats values(kCount);
      for (std::size_t i = 0; i < kCount; ++i) values[i] = rank == 0 ? 1.0F : 0.001F * static_cast<float>(i);
      gradients.push_back(encoded(dtype, values));
      Floats sent(kCount + 256);
      kernel::decode(dtype, gradients.back().data(), sent.data(), kCount);
      for (std::size_t i = 0; i < kCount; ++i) expected[i] += sent[i] / 2;  // exact: a power of two
    }
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      const auto push = rounded_push(rank, dtype, gradients[rank]);
      ASSERT_TRUE(shard.add(push, workers[rank], gradients[rank], [] {}).ok());
    }
    ASSERT_TRUE(shard.pull(wire::Pull{kGradientArray}.make(header_of(wire::Kind::pull, 0, kWorkers)), workers[0]).ok());
    EXPECT_EQ(wire::StepResult::read(workers[1].sent[0].header).dtype, DType::float32);
    EXPECT_EQ(values_of(workers[0].sent[1].payload), expected) << dtype_name(dtype);
    for (float& value : expected) value = -value;
    EXPECT_EQ(values_of(workers[1].sent[0].payload), expected) << dtype_name(dtype);
  }
}

TEST_F(StoredShard, AnUpdateByOneRankAloneIsNotRoundedEither) {
  ASSERT_TRUE(assign(bytes_of(Floats{0, 0})).ok());
  set_rule(make_update_rule("sgd", {{"lr", 1}}).value());
  const Bytes gradient = encoded(DType::bfloat16, {1, 3});
  auto push = rounded_push(0, DType::bfloat16, gradient);
  push.divisor = 3;
  ASSERT_TRUE(shard_.add(push, workers_[0], gradient, [] {}).ok());
  push.rank = 1;
  push.payload_bytes = 0;
  ASSERT_TRUE(shard_.add(testing::absent_of(push), workers_[1], {}, nullptr).ok());
  EXPECT_EQ(values_of(last(1).payload), (Floats{-1.0F / 3, -1}));
}

TEST_F(StoredShard, RoundsItsValueOnceForAllWhoGetItInBfloat16) {
  for (auto& worker : workers_) worker.keep = true;
  ASSERT_TRUE(shard_.assign(wire::Assign{DType::bfloat16, 0, 0, true}.make({}), encoded(DType::bfloat16, {1, 2})).ok());
  pull(0);
  EXPECT_EQ(values_of(last(0).payload), (Floats{1, 2})) << "widened";
  set_rule(make_update_rule("sgd", {{"lr", 1}}).value());
  const Floats small{-0.0625F / 1024, -0.0625F / 1024};
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    lent_.push_back(encoded(DType::bfloat16, small));
    auto push = rounded_push(rank, DType::bfloat16, lent_.back());
    push.as_bfloat16 = true;
    ASSERT_TRUE(shard_.add(push, workers_[rank], lent_.back(), [] {}).ok());
  }
  EXPECT_EQ(wire::StepResult::read(last(0).header).dtype, DType::bfloat16);
  EXPECT_EQ(last(0).payload, encoded(DType::bfloat16, {1, 2})) << "too small to see";
  EXPECT_EQ(last(0).kept, last(1).kept) << "converted once";
  ASSERT_TRUE(shard_.pull(wire::Pull{0, true}.make(header_of(wire::Kind::pull, 0, kWorkers)), workers_[0]).ok());
  EXPECT_EQ(last(0).kept, last(1).kept);
  pull(1);
  EXPECT_EQ(values_of(last(1).payload), (Floats{1 + 0.0625F / 1024, 2 + 0.0625F / 1024})) << "but kept";
}

TEST_F(StoredShard, RefusesTypesThatAreImpossible) {
  const Bytes bytes(8);
  const auto refused = [&](wire::Contribution push) {
    push.payload_bytes = bytes.size();
    return shard_.add(push, workers_[0], bytes, [] {}).code() == ErrorCode::refused;
  };
  EXPECT_TRUE(refused(rounded_push(0, DType::float64, bytes))) << "not narrower than float32";
  auto push = rounded_push(0, DType::bfloat16, bytes);
  push.stored = false;
  EXPECT_TRUE(refused(push)) << "nothing is kept";
  push = stored_push_of(0, kWorkers);
  push.dtype = DType::bfloat16;
  push.as_bfloat16 = true;
  EXPECT_TRUE(refused(push)) << "the value is no float32";
  push.as_bfloat16 = false;
  EXPECT_FALSE(refused(push));
  EXPECT_EQ(shard_.assign(wire::Assign{DType::int32, 0, 0, true}.make({}), bytes).code(), ErrorCode::refused);
}

TEST_F(StoredShard, RefusesAssignmentsThatAreNoArrays) {
  EXPECT_EQ(assign({}).code(), ErrorCode::refused);
  EXPECT_EQ(assign(Bytes(7)).code(), ErrorCode::refused);
  EXPECT_EQ(assign(Bytes(8), 1).code(), ErrorCode::refused) << "no value yet";
  EXPECT_EQ(assign(Bytes(8), 0xffffffffu).code(), ErrorCode::refused);
}

TEST_F(StoredShard, RefusesRulesThatAreNone) {
  wire::Header header = header_of(wire::Kind::rule, 0, kWorkers);
  EXPECT_EQ(shard_.set_rule(header, Bytes(3)).code(), ErrorCode::refused);
  EXPECT_EQ(shard_.set_rule(header, {}).code(), ErrorCode::refused);
}

TEST_F(StoredShard, UpdatesWithTheMeanGradientByEveryRule) {
  std::mt19937 random(8);
  std::uint64_t step = 0;
  for (const DType dtype : {DType::float32, DType::float64}) {
    for (const UpdateRule& rule : update_rules()) {
      ReferenceParameters reference(random_reals(random, dtype, 500), dtype);
      ASSERT_TRUE(assign(reference.value, 0, 0, dtype).ok());
      set_rule(rule);
      for (int i = 0; i < 4; ++i) {
        const Bytes gradient = random_reals(random, dtype, 500);
        reference.update(rule, gradient);  // (g + g) / 2 is g
        push_all(++step, gradient, dtype);
        for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
          ASSERT_EQ(last(rank).header.kind, wire::Kind::result);
          ASSERT_EQ(last(rank).payload, reference.value) << "kind " << rule.kind->name;
        }
        for (std::uint32_t array = 1; array <= reference.states.size(); ++array) {
          pull(1, array);
          ASSERT_EQ(last(1).payload, reference.states[array - 1]);
          EXPECT_EQ(wire::Value::read(last(1).header).update_count, reference.update_count);
        }
      }
    }
  }
}

TEST_F(StoredShard, AStateThatWasSavedGoesOnWhereItStopped) {
  std::mt19937 random(9);
  const UpdateRule rule = update_rules()[4];
  ReferenceParameters reference(random_reals(random, DType::float32, 100), DType::float32);
  for (int i = 0; i < 3; ++i) reference.update(rule, random_reals(random, DType::float32, 100));
  ASSERT_TRUE(assign(reference.value, 0, reference.update_count).ok());
  for (std::uint32_t array : {1u, 2u}) ASSERT_TRUE(assign(reference.states[array - 1], array, 3).ok());
  set_rule(rule);
  const Bytes gradient = random_reals(random, DType::float32, 100);
  push_all(1, gradient);
  reference.update(rule, gradient);
  EXPECT_EQ(last(0).payload, reference.value);
}

TEST_F(StoredShard, ANewRuleHoldsFromTheNextStepOn) {
  ASSERT_TRUE(assign(bytes_of(Floats{1})).ok());
  UpdateRule rule = update_rules()[0];
  rule = testing::with(rule, "lr", 0.5);
  set_rule(rule);
  push_all(1, bytes_of(Floats{1}));
  EXPECT_EQ(values_of(last(0).payload), Floats{0.5});
  rule = testing::with(rule, "lr", 0.25);
  set_rule(rule);
  push_all(2, bytes_of(Floats{1}));
  EXPECT_EQ(values_of(last(0).payload), Floats{0.25});
  set_rule({});  // none: the reduced gradient
  push_all(3, bytes_of(Floats{7}));
  EXPECT_EQ(values_of(last(0).payload), Floats{7});
}

TEST_F(StoredShard, APushWithoutResultUpdatesToo) {
  ASSERT_TRUE(assign(bytes_of(Floats{1})).ok());
  UpdateRule rule = update_rules()[0];
  rule = testing::with(rule, "lr", 0.5);
  set_rule(rule);
  ASSERT_TRUE(push(0, 1, bytes_of(Floats{1}), DType::float32, false).ok());
  ASSERT_TRUE(push(1, 1, bytes_of(Floats{1})).ok());
  EXPECT_FALSE(last(0).has_payload);
  EXPECT_EQ(last(0).header.kind, wire::Kind::result);
  EXPECT_EQ(values_of(last(1).payload), Floats{0.5});
  pull(0);
  EXPECT_EQ(values_of(last(0).payload), Floats{0.5});
}

TEST_F(StoredShard, AnUpdateThatCannotBeIsRefusedToAllAndTheChunkGoesOn) {
  UpdateRule rule = update_rules()[0];
  rule = testing::with(rule, "lr", 1);
  set_rule(rule);
  push_all(1, bytes_of(Floats{1}));  // no parameters yet
  ASSERT_TRUE(assign(bytes_of(Floats{5, 6})).ok());
  push_all(2, bytes_of(Floats{1}));                               // of another size
  push_all(3, bytes_of(std::vector<double>{1}), DType::float64);  // of another dtype
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    EXPECT_TRUE(workers_[rank].sent.empty());
    ASSERT_EQ(workers_[rank].refusals.size(), 3u);
    EXPECT_EQ(workers_[rank].refusals[0].code(), ErrorCode::refused);
    EXPECT_EQ(workers_[rank].refused[2].rank, rank);
    EXPECT_EQ(workers_[rank].refused[2].step, 3u);
  }
  push_all(4, bytes_of(Floats{1, 2}));
  EXPECT_EQ(values_of(last(0).payload), (Floats{4, 4}));
}

TEST_F(StoredShard, ResultsKeepTheirBytesWhileLaterStepsUpdate) {
  for (auto& worker : workers_) worker.keep = true;
  std::mt19937 random(10);
  ASSERT_TRUE(assign(random_reals(random, DType::float32, 64)).ok());
  set_rule(update_rules()[3]);
  for (std::uint64_t step = 1; step <= 5; ++step) {
    push_all(step, random_reals(random, DType::float32, 64));
    pull(0, 1);
  }
  for (const auto& worker : workers_)
    for (const auto& sent : worker.sent) EXPECT_EQ(copy_of(sent.kept), sent.payload);
}

}  // namespace
}  // namespace poseidon
