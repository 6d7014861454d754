// ChunkState, step by step: which contributions it refuses or drops, and when it releases memory.
#include "server/chunk/chunk_state.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpp/server/chunk/contributions.h"
#include "wire/update_rule.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::bytes_of;
using testing::dense_factors_of;
using testing::factors_of;
using testing::Floats;
using testing::push_of;
using testing::RecordingRequester;
using testing::values_of;
using testing::with_size;

class ChunkStateTest : public ::testing::Test {
 protected:
  ChunkState chunk(std::uint32_t worker_count, Reduction reduction = {}) { return {worker_count, reduction, pool_}; }

  wire::Contribution floats(wire::Contribution header, std::size_t count) {
    return with_size(header, count * sizeof(float));
  }

  void expect_refused(ChunkState& state, const wire::Contribution& header, const std::string& word) {
    const bool started = state.started();
    const auto missing = state.missing_ranks();
    const Status status = state.admit(header, &worker_);
    EXPECT_EQ(status.code(), ErrorCode::refused) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_EQ(state.started(), started);
    EXPECT_EQ(state.missing_ranks(), missing);
  }

  std::span<std::byte> place_of(ChunkState& state, std::uint32_t rank) {
    return state.place(rank, pool_->take(state.parts()[rank]->push.payload_bytes));
  }

  /// Admits and receives a whole payload. Returns the memory to which it was written.
  const std::byte* receive(ChunkState& state, const wire::Contribution& header, const Floats& values) {
    EXPECT_TRUE(state.admit(floats(header, values.size()), &worker_).ok());
    const auto place = place_of(state, header.rank);
    std::memcpy(place.data(), values.data(), place.size());
    state.complete(header.rank, place, nullptr);
    return place.data();
  }

  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  RecordingRequester worker_;
};

TEST_F(ChunkStateTest, RefusesWhatDoesNotFitTheFirst) {
  ChunkState state = chunk(3);
  ASSERT_TRUE(state.admit(floats(push_of(1, 3, 5), 2), &worker_).ok());
  expect_refused(state, floats(push_of(0, 3, 6), 2), "step 5");
  expect_refused(state, floats(push_of(0, 3, 4), 2), "step 5");
  expect_refused(state, floats(push_of(0, 3, 5), 3), "12 bytes");
  expect_refused(state, floats(push_of(0, 3, 5), 0), "0 bytes");
  expect_refused(state, floats(push_of(1, 3, 5), 2), "already");
  expect_refused(state, floats(push_of(0, 4, 5), 2), "4 workers");
  expect_refused(state, floats(push_of(3, 3, 5), 2), "workers");
  wire::Contribution header = floats(push_of(0, 3, 5), 2);
  header.divisor = 2;
  expect_refused(state, header, "divisor");
  header = floats(push_of(0, 3, 5), 2);
  header.dtype = DType::float64;
  expect_refused(state, header, "dtype");
  header = floats(push_of(0, 3, 5), 2);
  header.stored = true;
  expect_refused(state, header, "kind");
  EXPECT_FALSE(state.all_here());
  EXPECT_EQ(state.missing_ranks(), (std::vector<std::uint32_t>{0, 1, 2})) << "admitted is not received";
}

TEST_F(ChunkStateTest, RanksThatHaveSetDifferentRulesAreToldSo) {
  ChunkState state = chunk(3);
  wire::Contribution header = floats(push_of(1, 3), 2);
  header.rule_digest = wire::digest_of(make_update_rule("sgd", {{"lr", 0.1}}).value());
  ASSERT_TRUE(state.admit(header, &worker_).ok());
  header.rank = 2;
  ASSERT_TRUE(state.admit(header, &worker_).ok());
  header.rank = 0;
  for (const UpdateRule& other : {UpdateRule(), make_update_rule("sgd", {{"lr", 0.2}}).value()}) {
    header.rule_digest = wire::digest_of(other);
    const Status status = state.admit(header, &worker_);
    EXPECT_EQ(status.code(), ErrorCode::mismatch);
    for (const char* part : {"rank 0 has set", "than rank 1", "same rule on every rank"})
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
}

TEST_F(ChunkStateTest, RefusesWhatIsWrongByItself) {
  ChunkState state = chunk(2);
  wire::Contribution header = floats(push_of(0, 2), 1);
  header.divisor = 0;
  expect_refused(state, header, "divided by 0");
  header = floats(push_of(0, 2), 1);
  header.dtype = DType::int32;
  header.divisor = 2;
  expect_refused(state, header, "int32 cannot be divided");
  header = floats(push_of(0, 2), 1);
  header.dtype = DType::float64;
  expect_refused(state, header, "multiple");
  expect_refused(state, floats(absent_of(push_of(0, 2)), 1), "absent");
  header = factors_of(push_of(0, 2), 2, 3, 2);
  header.factor_count = 3;
  expect_refused(state, header, "size");
  header = factors_of(push_of(0, 2), 2, 3, 2);
  header.dtype = DType::int32;
  expect_refused(state, header, "floating");
  header = dense_factors_of(push_of(0, 2), 2, 3);
  header.payload_bytes += sizeof(float);
  expect_refused(state, header, "size");
  header = dense_factors_of(push_of(0, 2), 2, 3);
  header.rows = header.cols = 0xffffffffu;
  expect_refused(state, header, "size");
  header = dense_factors_of(push_of(0, 2), 2, 3);
  header.dtype = DType::int8_blocks;
  header.payload_bytes = *header.matrix_bytes();
  expect_refused(state, header, "floating");
  expect_refused(state, factors_of(push_of(0, 2), 0, 3, 0), "empty");
  expect_refused(state, factors_of(push_of(0, 2), 0xffffffffu, 0xffffffffu, 0), "too large");
  EXPECT_FALSE(state.started());
}

TEST_F(ChunkStateTest, RefusesFactorsOfAnotherShapeOfTheSameSize) {
  ChunkState state = chunk(3);
  ASSERT_TRUE(state.admit(factors_of(push_of(0, 3), 4, 4, 1), &worker_).ok());
  expect_refused(state, factors_of(push_of(1, 3), 2, 8, 1), "shape");
  expect_refused(state, dense_factors_of(push_of(1, 3), 8, 2), "shape");
  expect_refused(state, absent_of(factors_of(push_of(1, 3), 2, 8, 0)), "shape");
  expect_refused(state, factors_of(push_of(1, 3), 5, 4, 1), "80 bytes");
  EXPECT_TRUE(state.admit(dense_factors_of(push_of(1, 3), 4, 4), &worker_).ok());
  EXPECT_TRUE(state.admit(factors_of(push_of(2, 3), 4, 4, 2), &worker_).ok());
  EXPECT_EQ(state.shape().payload_bytes, 16 * sizeof(float));
}

TEST_F(ChunkStateTest, RanksThatTakeDifferentSchemesAreToldSo) {
  ChunkState state = chunk(2);
  ASSERT_TRUE(state.admit(factors_of(push_of(0, 2), 4, 4, 1), &worker_).ok());
  expect_refused(state, floats(push_of(1, 2), 16), "it sends push, but rank 0 sends factors");
  expect_refused(state, absent_of(push_of(1, 2)), "give the layer the same scheme on all ranks");
  ChunkState pushed = chunk(2);
  ASSERT_TRUE(pushed.admit(absent_of(push_of(1, 2)), &worker_).ok());
  expect_refused(pushed, dense_factors_of(push_of(0, 2), 4, 4), "same scheme");
}

TEST_F(ChunkStateTest, AbsentFirstAndThenSizes) {
  ChunkState state = chunk(3);
  ASSERT_TRUE(state.admit(absent_of(push_of(0, 3)), &worker_).ok());
  state.complete(0, {}, nullptr);
  EXPECT_FALSE(state.any_present());
  receive(state, push_of(2, 3), {1});
  expect_refused(state, floats(push_of(1, 3), 2), "bytes");
  receive(state, push_of(1, 3), {2});
  EXPECT_TRUE(state.all_here());
  EXPECT_TRUE(state.any_present());
  EXPECT_EQ(state.shape().payload_bytes, sizeof(float));
  EXPECT_EQ(values_of(state.take_sum().span()), Floats{3});
}

TEST_F(ChunkStateTest, DroppingTheOnlyOneMakesRoomForAnotherStep) {
  for (const ReduceOrder order : {ReduceOrder::rank, ReduceOrder::arrival}) {
    ChunkState state = chunk(2, {Aggregation::streaming, order});
    RecordingRequester gone;
    ASSERT_TRUE(state.admit(floats(push_of(0, 2, 1), 1), &gone).ok());
    state.drop(&worker_);
    EXPECT_TRUE(state.started());
    state.drop(&gone);
    EXPECT_FALSE(state.started());
    receive(state, push_of(1, 2, 7), {1, 2});
    receive(state, push_of(0, 2, 7), {10, 20});
    ASSERT_TRUE(state.all_here());
    EXPECT_EQ(values_of(state.take_sum().span()), (Floats{11, 22}));
  }
}

TEST_F(ChunkStateTest, NothingMoreFitsWhenOneThatIsInTheSumHasGone) {
  for (const ReduceOrder order : {ReduceOrder::rank, ReduceOrder::arrival}) {
    ChunkState state = chunk(3, {Aggregation::streaming, order});
    RecordingRequester gone;
    ASSERT_TRUE(state.admit(floats(push_of(0, 3), 2), &gone).ok());
    const auto place = place_of(state, 0);
    std::memset(place.data(), 0, place.size());
    state.complete(0, place, nullptr);
    receive(state, push_of(1, 3), {1, 2});
    state.drop(&gone);
    expect_refused(state, floats(push_of(0, 3), 2), "has left");
    expect_refused(state, floats(push_of(2, 3), 2), "has left");
    EXPECT_FALSE(state.all_here());
  }
}

TEST_F(ChunkStateTest, WhoHasGoneLeavesNoSizeBehind) {
  ChunkState state = chunk(3);
  RecordingRequester gone;
  ASSERT_TRUE(state.admit(absent_of(push_of(0, 3)), &worker_).ok());
  state.complete(0, {}, nullptr);
  ASSERT_TRUE(state.admit(floats(push_of(1, 3), 16), &gone).ok());
  state.drop(&gone);
  receive(state, push_of(1, 3), {1});
  receive(state, push_of(2, 3), {2});
  EXPECT_EQ(values_of(state.take_sum().span()), Floats{3});
}

TEST_F(ChunkStateTest, APartsMemoryIsFreeWhenItsLastByteIsAdded) {
  ChunkState state = chunk(3);
  constexpr std::size_t kCount = 100;
  receive(state, push_of(0, 3), Floats(kCount, 1));
  const std::byte* second = receive(state, push_of(1, 3), Floats(kCount, 2));
  Buffer reused = pool_->take(kCount * sizeof(float));
  EXPECT_EQ(reused.data(), second);
  Buffer fresh = pool_->take(kCount * sizeof(float));
  pool_->give_back(std::move(reused));
  EXPECT_EQ(receive(state, push_of(2, 3), Floats(kCount, 3)), second) << "the third takes the second's memory";
  EXPECT_EQ(values_of(state.take_sum().span()), Floats(kCount, 6));
}

TEST_F(ChunkStateTest, AddsWhatIsHereBeforeTheRestHasCome) {
  ChunkState state = chunk(2);
  constexpr std::size_t kCount = 64;
  receive(state, push_of(0, 2), Floats(kCount, 1));
  ASSERT_TRUE(state.admit(floats(push_of(1, 2), kCount), &worker_).ok());
  const auto place = place_of(state, 1);
  std::memset(place.data(), 0, place.size());
  const Floats half(kCount / 2, 5);
  std::memcpy(place.data(), half.data(), half.size() * sizeof(float));
  state.progress(1, half.size() * sizeof(float));
  std::memset(place.data(), 0x7f, half.size() * sizeof(float));  // added already: nobody reads it again
  state.complete(1, place, nullptr);
  Floats expected(kCount, 1);
  std::fill(expected.begin(), expected.begin() + kCount / 2, 6.0F);
  EXPECT_EQ(values_of(state.take_sum().span()), expected);
}

TEST_F(ChunkStateTest, AnAbsentLastRankDoesNotRoundSixteenBitSumsTwice) {
  ChunkState state = chunk(3);
  const std::vector<std::uint16_t> big(8, 0x7bff);  // 65504, the largest
  for (const std::uint32_t rank : {0u, 1u}) {
    wire::Contribution header = with_size(push_of(rank, 3), big.size() * 2);
    header.dtype = DType::float16;
    header.divisor = 2;
    ASSERT_TRUE(state.admit(header, &worker_).ok());
    state.complete(rank, std::as_bytes(std::span(big)), [] {});
  }
  wire::Contribution header = absent_of(push_of(2, 3));
  header.dtype = DType::float16;
  header.divisor = 2;
  ASSERT_TRUE(state.admit(header, &worker_).ok());
  state.complete(2, {}, nullptr);
  EXPECT_EQ(values_of<std::uint16_t>(state.take_sum().span()), big) << "not infinite on the way";
}

TEST_F(ChunkStateTest, SixteenBitPartsAreNotKept) {
  constexpr std::uint32_t kWorkers = 8;
  constexpr std::size_t kPartBytes = std::size_t{1} << 20;
  const auto budget = std::make_shared<MemoryBudget>(0);
  pool_ = std::make_shared<BufferPool>(budget);
  ChunkState state = chunk(kWorkers);
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    wire::Contribution header = with_size(push_of(rank, kWorkers), kPartBytes);
    header.dtype = DType::bfloat16;
    ASSERT_TRUE(state.admit(header, &worker_).ok());
    const auto place = place_of(state, rank);
    std::memset(place.data(), 0x3f, place.size());
    state.progress(rank, kPartBytes / 2);
    state.complete(rank, place, nullptr);
    EXPECT_LE(budget->used_bytes(), 4 * kPartBytes) << "the first, the next, and a sum of twice the size";
  }
  const Buffer sum = state.take_sum();
  EXPECT_EQ(sum.size(), kPartBytes);
}

TEST_F(ChunkStateTest, SixteenBitPartsWaitWhereThereIsNoMemoryForTheirSum) {
  constexpr std::size_t kPartBytes = 1000;
  pool_ = std::make_shared<BufferPool>(std::make_shared<MemoryBudget>(4 * kPartBytes));
  ChunkState state = chunk(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    wire::Contribution header = with_size(push_of(rank, 3), kPartBytes);
    header.dtype = DType::bfloat16;
    ASSERT_TRUE(state.admit(header, &worker_).ok());
    const auto place = place_of(state, rank);
    std::ranges::fill(place, std::byte{0x40});  // 3.0
    if (rank == 1) ASSERT_TRUE(pool_->try_charge(kPartBytes));
    state.complete(rank, place, nullptr);
  }
  ASSERT_TRUE(state.all_here());
  EXPECT_EQ(values_of<std::uint16_t>(state.take_sum().span()), std::vector<std::uint16_t>(kPartBytes / 2, 0x4110));
}

TEST_F(ChunkStateTest, OrphanedPartsStayInTheSum) {
  ChunkState state = chunk(2, {Aggregation::wide, ReduceOrder::rank});
  RecordingRequester gone;
  ASSERT_TRUE(state.admit(floats(push_of(0, 2), 1), &gone).ok());
  place_of(state, 0);
  state.complete(0, state.parts()[0]->payload, nullptr);
  receive(state, push_of(1, 2), {1});
  state.orphan(&gone);
  EXPECT_TRUE(state.all_here());
  EXPECT_EQ(state.parts()[0]->from, nullptr);
  EXPECT_EQ(state.parts()[1]->from, &worker_);
  EXPECT_EQ(state.dense_inputs().size(), 2u);
}

}  // namespace
}  // namespace poseidon
