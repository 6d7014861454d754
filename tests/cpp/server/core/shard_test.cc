// Shard: contributions in, results out. What it keeps between steps is in stored_chunk_test.cc.
#include "server/core/shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "cpp/server/chunk/contributions.h"
#include "server/baselines/wide_aggregation.h"

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

/// A shard and its workers. The memory that they lend stays valid.
struct Fixture {
  explicit Fixture(std::uint32_t worker_count, Reduction reduction = {}, ShardThreads threads = {})
      : workers(worker_count), shard(worker_count, reduction, threads) {}

  Status add(wire::Contribution header, const Floats& values, int* released = nullptr) {
    lent.push_back(values);
    header.payload_bytes = values.size() * sizeof(float);
    return shard.add(header, workers[header.rank], std::as_bytes(std::span(lent.back())), [released] {
      if (released != nullptr) ++*released;
    });
  }
  Status add_absent(const wire::Contribution& header) {
    return shard.add(absent_of(header), workers[header.rank], {}, nullptr);
  }
  Floats last(std::uint32_t rank) const { return values_of(workers[rank].sent.back().payload); }
  std::size_t sent_count() const {
    std::size_t count = 0;
    for (const auto& worker : workers) count += worker.sent.size();
    return count;
  }

  std::deque<Floats> lent;
  std::vector<RecordingRequester> workers;
  Shard shard;
};

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
  Fixture fixture(kRanks);
  std::uint64_t step = 0;
  do {
    ++step;
    for (const auto rank : order) {
      wire::Contribution header = push_of(rank, kRanks, step);
      header.divisor = 3;
      ASSERT_EQ(fixture.sent_count(), (step - 1) * kRanks);
      ASSERT_TRUE(fixture.add(header, inputs[rank]).ok());
    }
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(fixture.workers[rank].sent.size(), step);
      const wire::Header& header = fixture.workers[rank].sent.back().header;
      EXPECT_EQ(header.rank, rank);
      EXPECT_EQ(header.step, step);
      EXPECT_EQ(header.kind, wire::Kind::result);
      ASSERT_EQ(fixture.last(rank), expected);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Shard, ReceivesPayloadsPieceByPiece) {
  Fixture fixture(3);
  const Floats values(1000, 1.5F);
  const auto bytes = std::as_bytes(std::span(values));
  std::vector<std::span<std::byte>> places;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    auto place = fixture.shard.begin(with_size(push_of(rank, 3), bytes.size()), fixture.workers[rank]);
    ASSERT_TRUE(place.ok());
    ASSERT_EQ(place.value().size(), bytes.size());
    places.push_back(place.value());
  }
  constexpr std::size_t kPiece = 333;
  for (std::size_t begin = 0; begin < bytes.size(); begin += kPiece) {
    const std::size_t end = std::min(begin + kPiece, bytes.size());
    for (const std::uint32_t rank : {2u, 0u, 1u}) {
      ASSERT_EQ(fixture.sent_count(), 0u);
      std::memcpy(places[rank].data() + begin, bytes.data() + begin, end - begin);
      const wire::Contribution header = with_size(push_of(rank, 3), bytes.size());
      if (end < bytes.size())
        fixture.shard.progress(header, end);
      else
        fixture.shard.complete(header);
    }
  }
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(fixture.last(rank), Floats(1000, 4.5F));
}

TEST(Shard, FactorCountsAreSummedAndSaturate) {
  Fixture fixture(2);
  std::uint64_t step = 0;
  for (const std::uint32_t second : {4u, wire::kUnboundedFactors}) {
    ++step;
    for (const std::uint32_t rank : {0u, 1u}) {
      wire::Contribution header = push_of(rank, 2, step);
      header.factor_count = rank == 0 ? 3 : second;
      ASSERT_TRUE(fixture.add(header, {1}).ok());
    }
    EXPECT_EQ(wire::StepResult::read(fixture.workers[0].sent.back().header).factor_count,
              second == 4 ? 7 : wire::kUnboundedFactors);
  }
}

TEST(Shard, AbsentContributionsDoNotCount) {
  Fixture fixture(3);
  ASSERT_TRUE(fixture.add_absent(push_of(1, 3)).ok());
  ASSERT_TRUE(fixture.add(push_of(2, 3), {4, 5}).ok());
  ASSERT_TRUE(fixture.add_absent(push_of(0, 3)).ok());
  ASSERT_EQ(fixture.sent_count(), 3u);
  EXPECT_EQ(fixture.last(0), (Floats{4, 5}));
  EXPECT_FALSE(wire::StepResult::read(fixture.workers[0].sent[0].header).absent);
}

TEST(Shard, AllAbsentSendsAbsence) {
  Fixture fixture(2);
  ASSERT_TRUE(fixture.add_absent(push_of(1, 2)).ok());
  ASSERT_TRUE(fixture.add_absent(push_of(0, 2)).ok());
  ASSERT_EQ(fixture.sent_count(), 2u);
  EXPECT_TRUE(wire::StepResult::read(fixture.workers[0].sent[0].header).absent);
  EXPECT_FALSE(fixture.workers[0].sent[0].has_payload);
}

TEST(Shard, FactorsAndDenseGradientsAddUp) {
  Fixture fixture(3);
  // Rank 0: [1 2]ᵀ·[1 0 1] + [0 1]ᵀ·[2 2 2]; rank 1: dense; rank 2: no rows at all.
  ASSERT_TRUE(fixture.add(factors_of(push_of(2, 3), 2, 3, 0), {}).ok());
  ASSERT_TRUE(fixture.add(dense_factors_of(push_of(1, 3), 2, 3), {10, 20, 30, 40, 50, 60}).ok());
  ASSERT_TRUE(fixture.add(factors_of(push_of(0, 3), 2, 3, 2), {1, 2, 0, 1, 1, 0, 1, 2, 2, 2}).ok());
  ASSERT_EQ(fixture.sent_count(), 3u);
  EXPECT_EQ(fixture.last(1), (Floats{11, 20, 31, 44, 52, 64}));
}

TEST(Shard, EveryLoanIsReleasedExactlyOnce) {
  Fixture fixture(2);
  int completed = 0;
  int dropped = 0;
  int refused = 0;
  ASSERT_TRUE(fixture.add(push_of(0, 2), {1}, &completed).ok());
  EXPECT_FALSE(fixture.add(push_of(0, 2), {1}, &refused).ok());
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(completed, 0);
  ASSERT_TRUE(fixture.add(push_of(1, 2), {1}, &completed).ok());
  EXPECT_EQ(completed, 2);
  ASSERT_TRUE(fixture.add(push_of(0, 2, 2), {1}, &dropped).ok());
  fixture.shard.drop(fixture.workers[1]);
  EXPECT_EQ(dropped, 0);
  fixture.shard.drop(fixture.workers[0]);
  fixture.shard.drop(fixture.workers[0]);
  EXPECT_EQ(dropped, 1);
  EXPECT_EQ(completed, 2);
}

TEST(Shard, APushWithoutResultIsAnsweredWithoutPayload) {
  Fixture fixture(2);
  wire::Contribution header = push_of(1, 2);
  header.wants_result = false;
  ASSERT_TRUE(fixture.add(header, {1, 2}).ok());
  ASSERT_TRUE(fixture.add(push_of(0, 2), {10, 20}).ok());
  EXPECT_EQ(fixture.last(0), (Floats{11, 22}));
  ASSERT_EQ(fixture.workers[1].sent.size(), 1u);
  EXPECT_FALSE(fixture.workers[1].sent[0].has_payload);
  EXPECT_EQ(fixture.workers[1].sent[0].header.kind, wire::Kind::result);
}

TEST(Shard, ARefusedPushLeavesItsChunkToOthers) {
  Fixture fixture(1);
  wire::Contribution wrong = push_of(0, 1);
  wrong.divisor = 0;
  EXPECT_EQ(fixture.add(wrong, {1}).code(), ErrorCode::refused);
  EXPECT_FALSE(fixture.shard.begin(with_size(wrong, 4), fixture.workers[0]).ok());
  ASSERT_TRUE(fixture.add(push_of(0, 1, 9), {1, 2, 3}).ok());
  EXPECT_EQ(fixture.last(0), (Floats{1, 2, 3}));
}

TEST(Shard, TransientChunksAreForgotten) {
  Fixture fixture(1);
  wire::Contribution header = push_of(0, 1, 1);
  header.transient = true;
  ASSERT_TRUE(fixture.add(header, {1, 2}).ok());
  ASSERT_TRUE(fixture.add(header, {3}).ok());
  EXPECT_EQ(fixture.last(0), (Floats{3}));
}

TEST(Shard, OpenChunksNameTheMissingRanks) {
  Fixture fixture(4);
  wire::Contribution header = push_of(2, 4, 9);
  header.unit = 7;
  header.chunk = 3;
  ASSERT_TRUE(fixture.add(header, {1}).ok());
  EXPECT_TRUE(fixture.shard.open_chunks(0).empty());
  const auto open = fixture.shard.open_chunks(INT64_MAX);
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].about.unit, 7u);
  EXPECT_EQ(open[0].about.chunk, 3u);
  EXPECT_EQ(open[0].about.step, 9u);
  EXPECT_EQ(open[0].missing_ranks, (std::vector<std::uint32_t>{0, 1, 3}));
}

/// The wide baseline computes on other threads, and finishes on a loop.
class WideShard : public ::testing::Test {
 protected:
  /// Runs `body` on the shard's loop.
  void on_loop(const std::function<void()>& body) { loop_.call(body); }

  /// Waits until `rank` has received `count` answers.
  void wait_for(std::uint32_t rank, std::size_t count) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    for (std::size_t have = 0; have < count;) {
      on_loop([&] { have = fixture_->workers[rank].sent.size(); });
      ASSERT_LT(Clock::now(), deadline);
    }
  }
  ~WideShard() override {
    on_loop([this] { fixture_.reset(); });
  }

  WideAggregation wide_{3};
  Loop loop_{"shard"};
  std::unique_ptr<Fixture> fixture_ =
      std::make_unique<Fixture>(3, Reduction{Aggregation::wide, ReduceOrder::rank}, ShardThreads{&loop_, &wide_});
};

TEST_F(WideShard, GivesTheSameSums) {
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const std::size_t count = 1 + step * 37;  // of any size, also fewer elements than threads
    const std::size_t elements = step == 1 ? 2 : count;
    on_loop([&] {
      for (const std::uint32_t rank : {1u, 2u, 0u}) {
        wire::Contribution header = push_of(rank, 3, step);
        header.unit = static_cast<std::uint32_t>(step);
        header.divisor = 2;
        EXPECT_TRUE(fixture_->add(header, Floats(elements, static_cast<float>(rank + 1))).ok());
      }
    });
    wait_for(0, step);
    on_loop([&] { EXPECT_EQ(fixture_->last(2), Floats(elements, 3.0F)); });
  }
}

TEST_F(WideShard, AWorkerOrAShardThatGoesMeanwhileDisturbsNothing) {
  int released = 0;
  on_loop([&] {
    for (const std::uint32_t rank : {0u, 1u, 2u})
      EXPECT_TRUE(fixture_->add(push_of(rank, 3), Floats(1'000'000, 1.0F), &released).ok());
    fixture_->shard.drop(fixture_->workers[1]);
  });
  wait_for(0, 1);
  on_loop([&] {
    EXPECT_EQ(released, 3);
    EXPECT_EQ(fixture_->last(0), Floats(1'000'000, 3.0F));
    EXPECT_TRUE(fixture_->workers[1].sent.empty());
    for (const std::uint32_t rank : {0u, 1u, 2u})
      EXPECT_TRUE(fixture_->add(push_of(rank, 3, 2), Floats(1'000'000, 1.0F)).ok());
    fixture_.reset();  // waits for the threads, which read the parts
  });
}

// Project Adam's strategy: the server's loop computes a product of large matrices.
TEST(ShardProduct, LetsOthersHaveTheirTurns) {
  constexpr std::uint32_t kSide = 1024;
  constexpr std::uint32_t kFactors = 128;
  Loop loop("shard");
  std::vector<RecordingRequester> workers(2);
  std::vector<std::size_t> answers_when_others_ran;
  std::promise<void> over;
  std::unique_ptr<Shard> shard;
  const std::function<void()> other = [&] {
    answers_when_others_ran.push_back(workers[0].sent.size());
    if (!workers[0].sent.empty()) return over.set_value();
    loop.post(other);
  };
  const testing::Bytes factors(std::size_t{kFactors} * 2 * kSide * sizeof(float));
  loop.call([&] {
    shard = std::make_unique<Shard>(2, Reduction(), ShardThreads{&loop}, std::make_shared<MemoryBudget>(0));
    for (const std::uint32_t rank : {0u, 1u}) {
      const auto header = testing::factors_of(push_of(rank, 2), kSide, kSide, kFactors);
      ASSERT_TRUE(shard->add(header, workers[rank], factors, [] {}).ok());
    }
    const auto early = testing::factors_of(push_of(0, 2, 2), kSide, kSide, kFactors);
    EXPECT_EQ(shard->add(early, workers[0], factors, [] {}).code(), ErrorCode::refused) << "it is not made yet";
    loop.post(other);
  });
  ASSERT_EQ(over.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_GE(std::ranges::count(answers_when_others_ran, 0u), 3);
  EXPECT_EQ(workers[1].sent.at(0).payload.size(), std::size_t{kSide} * kSide * sizeof(float));
  loop.call([&] { shard.reset(); });
}

}  // namespace
}  // namespace poseidon
