// ChunkState and Shard: what is refused, and that the result does not depend on who came first.
#include "server/shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpp/server/contributions.h"
#include "server/chunk_state.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::contribution_of;
using testing::factors_of;
using testing::Floats;
using testing::push_of;

/// What the shard sent, by rank.
struct Sent {
  wire::Header header;
  Floats values;
};

struct Recorder {
  std::vector<std::pair<std::uint32_t, Sent>> all;
  Shard::SendResult send() {
    return [this](std::uint32_t rank, const wire::Header& header, std::shared_ptr<Buffer> payload) {
      Sent sent{header, {}};
      if (payload) {
        sent.values.resize(payload->size() / sizeof(float));
        std::memcpy(sent.values.data(), payload->data(), payload->size());
      }
      all.emplace_back(rank, std::move(sent));
    };
  }
};

void expect_refused(ChunkState& chunk, Contribution contribution, const std::string& word) {
  const std::size_t size_bytes = contribution.payload.size();
  const Status status = chunk.add(contribution);
  EXPECT_EQ(status.code(), ErrorCode::refused);
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  EXPECT_EQ(contribution.buffer.size(), size_bytes) << "not handed back";
}

TEST(ChunkState, RefusesWhatDoesNotFitTheFirst) {
  ChunkState chunk(3);
  Contribution first = contribution_of(push_of(1, 3, 5), {1, 2});
  ASSERT_TRUE(chunk.add(first).ok());
  expect_refused(chunk, contribution_of(push_of(0, 3, 6), {1, 2}), "step 5");
  expect_refused(chunk, contribution_of(push_of(0, 3, 4), {1, 2}), "step 5");
  expect_refused(chunk, contribution_of(push_of(0, 3, 5), {1, 2, 3}), "12 bytes");
  expect_refused(chunk, contribution_of(push_of(0, 3, 5), {}), "0 bytes");
  expect_refused(chunk, contribution_of(push_of(1, 3, 5), {1, 2}), "already");
  expect_refused(chunk, contribution_of(push_of(0, 4, 5), {1, 2}), "4 workers");
  expect_refused(chunk, contribution_of(push_of(3, 3, 5), {1, 2}), "workers");
  wire::Header header = push_of(0, 3, 5);
  header.divisor = 2;
  expect_refused(chunk, contribution_of(header, {1, 2}), "divisor");
  header = push_of(0, 3, 5);
  header.dtype = DType::float64;
  expect_refused(chunk, contribution_of(header, {1, 2}), "dtype");
  EXPECT_FALSE(chunk.complete());
  EXPECT_EQ(chunk.missing_ranks(), (std::vector<std::uint32_t>{0, 2}));
}

TEST(ChunkState, RefusesWhatIsWrongByItself) {
  ChunkState chunk(2);
  wire::Header header = push_of(0, 2);
  header.divisor = 0;
  expect_refused(chunk, contribution_of(header, {1}), "divided by 0");
  header = push_of(0, 2);
  header.dtype = DType::int32;
  header.divisor = 2;
  expect_refused(chunk, contribution_of(header, {1}), "int32 cannot be divided");
  header = push_of(0, 2);
  header.dtype = DType::float64;
  expect_refused(chunk, contribution_of(header, {1}), "multiple");
  header = push_of(0, 2);
  header.flags = wire::kAbsent;
  expect_refused(chunk, contribution_of(header, {1}), "absent");
  Contribution factors = factors_of(push_of(0, 2), 2, 3, Floats(10));
  factors.header.factor_count = 3;
  expect_refused(chunk, std::move(factors), "size");
  Contribution integers = factors_of(push_of(0, 2), 2, 3, Floats(10));
  integers.header.dtype = DType::int32;
  expect_refused(chunk, std::move(integers), "floating");
  Contribution empty = factors_of(push_of(0, 2), 2, 3, {});
  empty.header.rows = 0;
  expect_refused(chunk, std::move(empty), "empty");
  EXPECT_FALSE(chunk.started());
}

TEST(ChunkState, RefusesFactorsOfAnotherShapeOfTheSameSize) {
  ChunkState chunk(3);
  Contribution first = factors_of(push_of(0, 3), 4, 4, Floats(8));
  ASSERT_TRUE(chunk.add(first).ok());
  expect_refused(chunk, factors_of(push_of(1, 3), 2, 8, Floats(10)), "shape");
  Contribution dense = contribution_of(push_of(1, 3), Floats(16));
  EXPECT_TRUE(chunk.add(dense).ok());
  Contribution second = factors_of(push_of(2, 3), 4, 4, Floats(16));
  EXPECT_TRUE(chunk.add(second).ok());
  EXPECT_TRUE(chunk.complete());
}

TEST(ChunkState, AbsentFirstAndThenSizes) {
  ChunkState chunk(3);
  Contribution absent = absent_of(push_of(0, 3));
  Contribution one = contribution_of(push_of(2, 3), {1});
  ASSERT_TRUE(chunk.add(absent).ok());
  ASSERT_TRUE(chunk.add(one).ok());
  expect_refused(chunk, contribution_of(push_of(1, 3), {1, 2}), "bytes");
  Contribution two = contribution_of(push_of(1, 3), {2});
  ASSERT_TRUE(chunk.add(two).ok());
  EXPECT_TRUE(chunk.complete());
  EXPECT_EQ(chunk.shape().payload_bytes, sizeof(float));
}

TEST(ChunkState, RemoveMakesRoom) {
  ChunkState chunk(2);
  Contribution first = contribution_of(push_of(0, 2, 1), {1});
  ASSERT_TRUE(chunk.add(first).ok());
  EXPECT_FALSE(chunk.remove(1).has_value());
  EXPECT_FALSE(chunk.remove(9).has_value());
  EXPECT_TRUE(chunk.remove(0).has_value());
  EXPECT_FALSE(chunk.started());
  Contribution other_step = contribution_of(push_of(1, 2, 7), {1, 2});
  EXPECT_TRUE(chunk.add(other_step).ok());
}

TEST(Shard, TheSumIsInRankOrderWhateverTheArrivalOrder) {
  constexpr std::uint32_t kRanks = 5;
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1000);
  std::vector<Floats> inputs(kRanks, Floats(300));
  for (auto& input : inputs)
    for (auto& value : input) value = normal(random) * std::exp2(static_cast<float>(random() % 20));
  Floats expected(300);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    float sum = inputs[0][i];
    for (std::uint32_t rank = 1; rank < kRanks; ++rank) sum += inputs[rank][i];
    expected[i] = sum / 3.0F;
  }
  std::vector<std::uint32_t> order(kRanks);
  std::iota(order.begin(), order.end(), 0u);
  Recorder recorder;
  Shard shard(kRanks, recorder.send());
  std::uint64_t step = 0;
  do {
    recorder.all.clear();
    ++step;
    for (const auto rank : order) {
      wire::Header header = push_of(rank, kRanks, step);
      header.divisor = 3;
      ASSERT_TRUE(recorder.all.empty());
      ASSERT_TRUE(shard.add(contribution_of(header, inputs[rank])).ok());
    }
    ASSERT_EQ(recorder.all.size(), kRanks);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(recorder.all[rank].first, rank);
      EXPECT_EQ(recorder.all[rank].second.header.rank, rank);
      EXPECT_EQ(recorder.all[rank].second.header.step, step);
      EXPECT_EQ(recorder.all[rank].second.header.kind, wire::Kind::result);
    }
    ASSERT_EQ(recorder.all[0].second.values, expected);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Shard, FactorCountsAreSummedAndSaturate) {
  Recorder recorder;
  Shard shard(2, recorder.send());
  for (const std::uint32_t second : {4u, wire::kUnboundedFactors}) {
    recorder.all.clear();
    for (const std::uint32_t rank : {0u, 1u}) {
      wire::Header header = push_of(rank, 2);
      header.factor_count = rank == 0 ? 3 : second;
      ASSERT_TRUE(shard.add(contribution_of(header, {1})).ok());
    }
    EXPECT_EQ(recorder.all[0].second.header.factor_count, second == 4 ? 7 : wire::kUnboundedFactors);
  }
}

TEST(Shard, AbsentContributionsDoNotCount) {
  Recorder recorder;
  Shard shard(3, recorder.send());
  ASSERT_TRUE(shard.add(absent_of(push_of(1, 3))).ok());
  ASSERT_TRUE(shard.add(contribution_of(push_of(2, 3), {4, 5})).ok());
  ASSERT_TRUE(shard.add(absent_of(push_of(0, 3))).ok());
  ASSERT_EQ(recorder.all.size(), 3u);
  EXPECT_EQ(recorder.all[0].second.values, (Floats{4, 5}));
  EXPECT_EQ(recorder.all[0].second.header.flags & wire::kAbsent, 0);
}

TEST(Shard, AllAbsentSendsAbsence) {
  Recorder recorder;
  Shard shard(2, recorder.send());
  ASSERT_TRUE(shard.add(absent_of(push_of(1, 2))).ok());
  ASSERT_TRUE(shard.add(absent_of(push_of(0, 2))).ok());
  ASSERT_EQ(recorder.all.size(), 2u);
  EXPECT_NE(recorder.all[0].second.header.flags & wire::kAbsent, 0);
  EXPECT_TRUE(recorder.all[0].second.values.empty());
}

TEST(Shard, FactorsAndDenseGradientsAddUp) {
  Recorder recorder;
  Shard shard(3, recorder.send());
  // Rank 0: [1 2]ᵀ·[1 0 1] + [0 1]ᵀ·[2 2 2]; rank 1: dense; rank 2: no rows at all.
  ASSERT_TRUE(shard.add(factors_of(push_of(2, 3), 2, 3, {})).ok());
  ASSERT_TRUE(shard.add(contribution_of(push_of(1, 3), {10, 20, 30, 40, 50, 60})).ok());
  ASSERT_TRUE(shard.add(factors_of(push_of(0, 3), 2, 3, {1, 2, 0, 1, 1, 0, 1, 2, 2, 2})).ok());
  ASSERT_EQ(recorder.all.size(), 3u);
  EXPECT_EQ(recorder.all[1].second.values, (Floats{11, 20, 31, 44, 52, 64}));
}

TEST(Shard, EveryLoanIsReleasedExactlyOnce) {
  Recorder recorder;
  Shard shard(2, recorder.send());
  int completed = 0;
  int dropped = 0;
  int refused = 0;
  ASSERT_TRUE(shard.add(contribution_of(push_of(0, 2), {1}, &completed)).ok());
  EXPECT_FALSE(shard.add(contribution_of(push_of(0, 2), {1}, &refused)).ok());
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(completed, 0);
  ASSERT_TRUE(shard.add(contribution_of(push_of(1, 2), {1}, &completed)).ok());
  EXPECT_EQ(completed, 2);
  ASSERT_TRUE(shard.add(contribution_of(push_of(0, 2, 2), {1}, &dropped)).ok());
  shard.drop(1);
  EXPECT_EQ(dropped, 0);
  shard.drop(0);
  shard.drop(0);
  EXPECT_EQ(dropped, 1);
  EXPECT_EQ(completed, 2);
}

TEST(Shard, TransientChunksAreForgotten) {
  Recorder recorder;
  Shard shard(1, recorder.send());
  wire::Header header = push_of(0, 1, 1);
  header.flags = wire::kTransient;
  ASSERT_TRUE(shard.add(contribution_of(header, {1, 2})).ok());
  ASSERT_TRUE(shard.add(contribution_of(header, {3})).ok());
  EXPECT_EQ(recorder.all[1].second.values, (Floats{3}));
}

TEST(Shard, OverdueChunksNameTheMissingRanks) {
  Recorder recorder;
  Shard shard(4, recorder.send());
  wire::Header header = push_of(2, 4, 9);
  header.unit = 7;
  header.chunk = 3;
  ASSERT_TRUE(shard.add(contribution_of(header, {1})).ok());
  std::vector<std::string> texts;
  const auto visit = [&](const wire::Header& about, const std::string& why) {
    EXPECT_EQ(about.unit, 7u);
    EXPECT_EQ(about.chunk, 3u);
    EXPECT_EQ(about.step, 9u);
    texts.push_back(why);
  };
  shard.for_each_overdue(0, visit);
  EXPECT_TRUE(texts.empty());
  shard.for_each_overdue(INT64_MAX, visit);
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_NE(texts[0].find("rank 0, 1, 3"), std::string::npos) << texts[0];
}

}  // namespace
}  // namespace poseidon
