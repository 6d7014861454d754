// Shard: the limits of the memory that a job may use.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/contributions.h"
#include "server/core/shard.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::bytes_of;
using testing::factors_of;
using testing::Floats;
using testing::header_of;
using testing::push_of;
using testing::RecordingRequester;
using testing::stored_push_of;
using testing::values_of;
using testing::with_size;

constexpr std::size_t kLimit = 1u << 20;

/// A shard with a limit of memory, and its workers. It receives their payloads into its own memory.
class ShardLimits : public ::testing::Test {
 protected:
  void start(std::uint32_t worker_count, Reduction reduction = {}) {
    workers_.resize(worker_count);
    shard_ = std::make_unique<Shard>(worker_count, reduction, ShardThreads{}, budget_);
  }

  Status push(wire::Contribution header, const Floats& values) {
    header.payload_bytes = values.size() * sizeof(float);
    auto place = shard_->begin(header, workers_[header.rank]);
    if (!place.ok()) return place.status();
    std::memcpy(place.value().data(), values.data(), header.payload_bytes);
    shard_->complete(header);
    return {};
  }

  static void expect_over_limit(const Status& status) {
    EXPECT_EQ(status.code(), ErrorCode::refused);
    EXPECT_NE(status.message().find("memory_limit"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(std::to_string(kLimit)), std::string::npos) << status.message();
  }

  template <typename Message>
  static Message of_chunk(Message header, std::uint32_t chunk) {
    header.chunk = chunk;
    return header;
  }

  std::shared_ptr<MemoryBudget> budget_ = std::make_shared<MemoryBudget>(kLimit);
  std::vector<RecordingRequester> workers_;
  std::unique_ptr<Shard> shard_;
};

TEST_F(ShardLimits, APushThatHasNoRoomIsRefusedBeforeAnythingIsTaken) {
  start(1);
  for (const std::uint64_t size_bytes : {std::uint64_t{2 * kLimit}, wire::kMaxPayloadBytes}) {
    expect_over_limit(shard_->begin(with_size(push_of(0, 1), size_bytes), workers_[0]).status());
    EXPECT_EQ(budget_->used_bytes(), 0u);
  }
  ASSERT_TRUE(push(push_of(0, 1, 5), {1, 2}).ok());
  EXPECT_EQ(values_of(workers_[0].sent.at(0).payload), (Floats{1, 2}));
}

TEST_F(ShardLimits, WhatIsThereAlreadyCounts) {
  start(2);
  const Floats half(kLimit / 8, 1.0F);  // of the limit
  ASSERT_TRUE(push(of_chunk(push_of(0, 2), 0), half).ok());
  expect_over_limit(push(of_chunk(push_of(0, 2), 1), half));
  ASSERT_TRUE(push(of_chunk(push_of(1, 2), 2), Floats(10)).ok());
  shard_->drop(workers_[0]);  // and with it what it had pushed
  ASSERT_TRUE(push(of_chunk(push_of(1, 2), 1), half).ok());
}

TEST_F(ShardLimits, SizesThatChangeFromStepToStepLeaveNothingBehind) {
  start(1);
  for (std::uint64_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(push(push_of(0, 1, step), Floats(1000 * step, 1.0F)).ok()) << "step " << step;
    ASSERT_LE(budget_->used_bytes(), kLimit);
  }
}

TEST_F(ShardLimits, ResultsThatNobodyReadsCount) {
  start(1);
  workers_[0].keep = true;
  const Floats tenth(kLimit / 40, 1.0F);
  std::uint64_t step = 1;
  while (push(push_of(0, 1, step), tenth).ok()) ASSERT_LE(++step, 11u);
  EXPECT_GE(step, 9u);
  workers_[0].sent.clear();
  EXPECT_TRUE(push(push_of(0, 1, step), tenth).ok());
}

TEST_F(ShardLimits, AFewFactorsMakeNoLargeMatrix) {
  start(2);
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const std::uint32_t side = step == 1 ? 1024 : 64;  // 4 MiB, 16 KiB
    for (const std::uint32_t rank : {0u, 1u}) {
      const wire::Contribution header = factors_of(push_of(rank, 2, step), side, side, 1);
      ASSERT_TRUE(push(header, Floats(2 * side, 1.0F)).ok());
    }
    if (step > 1) continue;
    for (const auto& worker : workers_) {
      ASSERT_EQ(worker.refusals.size(), 1u) << "nobody gets a result";
      expect_over_limit(worker.refusals[0]);
    }
    EXPECT_TRUE(workers_[0].sent.empty());
  }
  EXPECT_EQ(values_of(workers_[1].sent.at(0).payload), Floats(64 * 64, 2.0F)) << "the chunk goes on";
}

TEST_F(ShardLimits, AnUpdateWhoseStateHasNoRoomLeavesTheValue) {
  start(1);
  const Floats value(kLimit / 16, 3.0F);  // a quarter
  const auto assignment = with_size(header_of(wire::Kind::assign, 0, 1), value.size() * sizeof(float));
  ASSERT_TRUE(shard_->assign(assignment, bytes_of(value)).ok());
  const UpdateRule rule = testing::rule_of("adam");
  ASSERT_TRUE(shard_->set_rule(header_of(wire::Kind::rule, 0, 1), wire::Rule{rule}.make({}).payload()).ok());
  ASSERT_TRUE(push(stored_push_of(0, 1), value).ok());
  ASSERT_EQ(workers_[0].refusals.size(), 1u);
  expect_over_limit(workers_[0].refusals[0]);
  ASSERT_TRUE(shard_->pull(header_of(wire::Kind::pull, 0, 1), workers_[0]).ok());
  EXPECT_EQ(values_of(workers_[0].sent.at(0).payload), value);
}

TEST_F(ShardLimits, ValuesCount) {
  start(1);
  const Floats value(kLimit / 16, 3.0F);
  const auto assignment = with_size(header_of(wire::Kind::assign, 0, 1), value.size() * sizeof(float));
  std::uint32_t chunk = 0;
  Status status;
  while ((status = shard_->assign(of_chunk(assignment, chunk), bytes_of(value))).ok()) ASSERT_LE(++chunk, 4u);
  EXPECT_EQ(chunk, 3u) << "and what the tables need";
  expect_over_limit(status);
  wire::Header state = wire::Pull{1}.make({});  // which would be made
  ASSERT_TRUE(shard_->pull(state, workers_[0]).ok());
  state.chunk = 1;
  ASSERT_TRUE(shard_->pull(state, workers_[0]).ok());
  EXPECT_LE(budget_->used_bytes(), kLimit);
  ASSERT_EQ(workers_[0].refusals.size(), 2u);
  expect_over_limit(workers_[0].refusals[0]);
}

TEST_F(ShardLimits, EmptyChunksCountToo) {
  start(1u << 16);  // each has a place for every rank
  expect_over_limit(shard_->add(absent_of(push_of(0, 1u << 16)), workers_[0], {}, nullptr));
  start(1);
  std::uint32_t chunk = 0;
  Status status;
  while ((status = shard_->pull(of_chunk(header_of(wire::Kind::pull, 0, 1), chunk), workers_[0])).ok())
    ASSERT_LT(++chunk, kLimit / 64);
  EXPECT_GT(chunk, 100u);
  expect_over_limit(status);
}

TEST_F(ShardLimits, ChunksThatAreForgottenDoNotCount) {
  start(1);
  wire::Contribution transient = push_of(0, 1);
  transient.transient = true;
  ASSERT_TRUE(push(transient, {1}).ok());
  const std::size_t used = budget_->used_bytes();
  wire::Header wrong = with_size(wire::Assign{DType::float32, 1}.make({}), 8);  // a state before the value
  for (std::uint32_t chunk = 0; chunk < 10'000; ++chunk) {
    ASSERT_TRUE(push(of_chunk(transient, chunk), {1}).ok());
    workers_[0].sent.clear();
    EXPECT_EQ(shard_->assign(of_chunk(wrong, chunk), testing::Bytes(8)).code(), ErrorCode::refused);
  }
  EXPECT_EQ(budget_->used_bytes(), used);
}

TEST_F(ShardLimits, RulesCount) {
  start(1);
  const UpdateRule rule = testing::rule_of("sgd");
  wire::Header header = header_of(wire::Kind::rule, 0, 1);
  const auto payload = wire::Rule{rule}.make({});
  Status status;
  while ((status = shard_->set_rule(header, payload.payload())).ok()) ASSERT_LT(++header.unit, kLimit / 64);
  expect_over_limit(status);
  --header.unit;
  EXPECT_TRUE(shard_->set_rule(header, payload.payload()).ok()) << "one that is there may change";
}

TEST_F(ShardLimits, AWorkerAsksForAChunkThatHasNoValueOnce) {
  start(2);
  const wire::Header pull = header_of(wire::Kind::pull, 0, 2);
  ASSERT_TRUE(shard_->pull(pull, workers_[0]).ok());
  EXPECT_EQ(shard_->pull(pull, workers_[0]).code(), ErrorCode::refused);
  ASSERT_TRUE(shard_->pull(header_of(wire::Kind::pull, 1, 2), workers_[1]).ok());
  ASSERT_TRUE(shard_->assign(with_size(header_of(wire::Kind::assign, 0, 2), 4), bytes_of(Floats{7})).ok());
  for (const auto& worker : workers_) EXPECT_EQ(values_of(worker.sent.at(0).payload), Floats{7});
  ASSERT_TRUE(shard_->pull(pull, workers_[0]).ok());
}

}  // namespace
}  // namespace poseidon
