// ParameterServer: results to which nobody has contributed.
#include "scheme/parameter_server.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "wire/messages/contribution.h"
#include "wire/messages/stored.h"

namespace poseidon {
namespace {

using Floats = std::vector<float>;

/// A unit of two chunks with two elements each. This worker's own memory has 7 everywhere.
class ParameterServerTest : public ::testing::Test {
 protected:
  ParameterServerTest() {
    unit_.name = "weights";
    unit_.size_bytes = values_.size() * sizeof(float);
    unit_.chunks.resize(2);
    for (std::uint32_t index = 0; index < 2; ++index) {
      unit_.chunks[index].index = index;
      unit_.chunks[index].offset_bytes = index * kChunkBytes;
      unit_.chunks[index].size_bytes = kChunkBytes;
    }
    links_.server_is_local = {false};
    links_.pool = std::make_shared<BufferPool>();
    exchange_.about.unit = &unit_;
    exchange_.on_complete = [this] { completed_ = true; };
    begin();
  }

  void begin() { begin(Push{.gradient = NoGradient{}, .destination = std::as_writable_bytes(std::span(values_))}); }

  /// Sets the state after start(), which itself would need a server.
  void begin(Operation operation) {
    exchange_.progress = Progress();  // the one before has ended
    exchange_.begin(std::move(operation), protocol_of(Scheme::ps), Scheme::ps, {});
    ServerAnswers& answers = exchange_.progress.answers.emplace();
    answers.missing_count = 2;
    answers.chunks.assign(2, ChunkArrival::awaited);
  }

  void receive(std::uint32_t chunk, const Floats& values, bool absent, bool late = false) {
    wire::StepResult result;
    result.absent = absent;
    result.late = late;
    wire::Header header = result.make({});
    header.step = exchange_.step;
    header.chunk = chunk;
    const auto payload = std::as_bytes(std::span(values));
    header.payload_bytes = payload.size();
    take(header, payload);
  }

  /// A message whose payload is lent, as a shard of this process does it.
  void take(const wire::Header& header, std::span<const std::byte> payload) {
    const auto place = accept(header, true);
    ASSERT_TRUE(place.ok()) << place.status().message();
    const Status status = protocol_of(Scheme::ps).receive(exchange_, header, payload, links_);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  Result<std::span<std::byte>> accept(const wire::Header& header, bool lent) {
    return protocol_of(Scheme::ps).accept(exchange_, header, lent, links_);
  }

  wire::Header result_of(std::uint32_t chunk, std::size_t payload_bytes) const {
    wire::Header header = wire::StepResult{}.make({});
    header.step = exchange_.step;
    header.chunk = chunk;
    header.payload_bytes = payload_bytes;
    return header;
  }

  static constexpr std::size_t kChunkBytes = 2 * sizeof(float);
  Floats values_ = Floats(4, 7);
  Unit unit_;
  Links links_;
  Exchange exchange_;
  bool completed_ = false;
};

TEST_F(ParameterServerTest, WhatNobodyContributedToIsZeroWhereOtherChunksHaveAResult) {
  for (const bool empty_one_last : {false, true}) {
    values_ = Floats(4, 7);
    begin();
    if (!empty_one_last) receive(0, {}, true, true);
    receive(1, {3, 4}, false, true);
    if (empty_one_last) receive(0, {}, true, true);
    EXPECT_TRUE(std::exchange(completed_, false));
    EXPECT_TRUE(exchange_.outcome.present);
    EXPECT_EQ(values_, (Floats{0, 0, 3, 4}));
  }
}

TEST_F(ParameterServerTest, WhereNobodyContributedAtAllNothingIsTouched) {
  receive(0, {}, true);
  receive(1, {}, true);
  EXPECT_TRUE(completed_);
  EXPECT_FALSE(exchange_.outcome.present);
  EXPECT_EQ(values_, Floats(4, 7));
}

TEST_F(ParameterServerTest, AStoredValueComesAlsoWhereNobodyContributed) {
  exchange_.about.stored = true;
  receive(0, {1, 2}, false);
  receive(1, {3, 4}, true);
  EXPECT_TRUE(completed_);
  EXPECT_TRUE(exchange_.outcome.present);
  EXPECT_EQ(values_, (Floats{1, 2, 3, 4}));
}

TEST_F(ParameterServerTest, APullSaysHowManyUpdatesTheMostUpdatedChunkHasHad) {
  begin(Pull{std::as_writable_bytes(std::span(values_))});
  for (const auto& [chunk, update_count] : {std::pair{0u, 9u}, {1u, 8u}}) {
    wire::Value value;
    value.update_count = update_count;
    wire::Header header = value.make({});
    header.chunk = chunk;
    const Floats values{1, 2};
    header.payload_bytes = kChunkBytes;
    take(header, std::as_bytes(std::span(values)));
  }
  EXPECT_EQ(exchange_.outcome.update_count, 9u);
}

TEST_F(ParameterServerTest, AResultIsAcceptedOnceHoweverItComes) {
  for (const bool lent : {false, true}) {
    begin();
    EXPECT_TRUE(accept(result_of(0, kChunkBytes), lent).ok());
    for (const bool again : {false, true}) {
      const auto second = accept(result_of(0, kChunkBytes), again);
      EXPECT_EQ(second.status().code(), ErrorCode::mismatch) << "the first one is still being received";
    }
    EXPECT_TRUE(accept(result_of(1, kChunkBytes), lent).ok()) << "another chunk's";
    EXPECT_FALSE(completed_);
  }
}

TEST_F(ParameterServerTest, AResultThatDoesNotFitIsRefusedHoweverItComes) {
  for (const bool lent : {false, true}) {
    for (const std::size_t payload_bytes : {std::size_t{0}, kChunkBytes - 1, kChunkBytes + 1})
      EXPECT_EQ(accept(result_of(0, payload_bytes), lent).status().code(), ErrorCode::mismatch) << payload_bytes;
    EXPECT_EQ(accept(result_of(2, kChunkBytes), lent).status().code(), ErrorCode::mismatch) << "no such chunk";
    wire::Header early = result_of(0, kChunkBytes);
    ++early.step;
    EXPECT_EQ(accept(early, lent).status().code(), ErrorCode::mismatch);
    wire::Header other = wire::StepResult{.dtype = DType::float64}.make(early);
    --other.step;
    EXPECT_EQ(accept(other, lent).status().code(), ErrorCode::mismatch) << "another dtype";
  }
  EXPECT_EQ(accept(result_of(0, kChunkBytes), false).value().data(), std::as_bytes(std::span(values_)).data());
}

}  // namespace
}  // namespace poseidon
