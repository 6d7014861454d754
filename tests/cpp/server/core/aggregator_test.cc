// A shard whose unit has an aggregator other than the sum: it collects all contributions and reduces them in rank
// order.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/contributions.h"
#include "cpp/server/pace/paced_shard.h"
#include "server/baselines/wide_aggregation.h"
#include "server/core/shard.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Bytes;
using testing::bytes_of;
using testing::Floats;
using testing::header_of;
using testing::stored_push_of;
using testing::values_of;
using testing::with_size;

/// Writes the ranks' first elements as decimal digits, so that a result shows which contributions it is made of, and in
/// which order.
struct Digits {
  template <typename T>
  void operator()(const AggregateCall<T>& call) const {
    for (std::size_t i = 0; i < call.result.size(); ++i) {
      call.result[i] = 0;
      for (const auto contribution : call.contributions) call.result[i] = call.result[i] * 10 + contribution[i];
    }
  }
};

UpdateRule rule_with(const std::string& aggregator, UpdateRule rule = {}) {
  static const bool registered = register_aggregator({"digits", Digits(), Digits()}).ok();
  EXPECT_TRUE(registered);
  rule.aggregator = aggregator;
  return rule;
}

Status set_rule(Shard& shard, const UpdateRule& rule, std::uint32_t worker_count, std::uint32_t rank = 0,
                std::uint64_t step = 1) {
  const auto message = wire::Rule{rule}.make(header_of(wire::Kind::rule, rank, worker_count, step));
  return shard.set_rule(message.header, message.payload());
}

void expect_refused(const Status& status, const std::string& word) {
  EXPECT_EQ(status.code(), ErrorCode::refused) << word;
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
}

/// A shard and its workers, whose payloads are received.
struct Collecting {
  explicit Collecting(std::uint32_t worker_count, Reduction reduction = {}, std::size_t memory_limit = 0)
      : workers(worker_count),
        budget(std::make_shared<MemoryBudget>(memory_limit)),
        shard(worker_count, reduction, {}, budget) {}

  std::uint32_t worker_count() const { return static_cast<std::uint32_t>(workers.size()); }
  wire::Contribution header(std::uint32_t rank, std::uint64_t step) const {
    auto header = stored_push_of(rank, worker_count(), step);
    header.divisor = worker_count();
    return header;
  }
  template <typename T>
  Status push(const wire::Contribution& header, const std::vector<T>& values) {
    const auto sized = with_size(header, values.size() * sizeof(T));
    auto place = shard.begin(sized, workers[header.rank]);
    if (!place.ok()) return place.status();
    std::memcpy(place.value().data(), values.data(), place.value().size());
    shard.progress(sized, place.value().size() / 2);
    shard.complete(sized);
    return {};
  }
  Status push(std::uint32_t rank, std::uint64_t step, const Floats& values) { return push(header(rank, step), values); }
  Status push_absent(std::uint32_t rank, std::uint64_t step) {
    return shard.add(absent_of(header(rank, step)), workers[rank], {}, nullptr);
  }
  template <typename T = float>
  std::vector<T> last(std::uint32_t rank) const {
    return values_of<T>(workers[rank].sent.back().payload);
  }

  std::vector<testing::RecordingRequester> workers;
  std::shared_ptr<MemoryBudget> budget;
  Shard shard;
};

/// Only rank 0 tells the rule, directly before its own push. The others may have pushed before.
TEST(Aggregators, GetTheContributionsInRankOrderWhateverTheArrivalOrder) {
  constexpr std::uint32_t kRanks = 4;
  for (const Aggregation aggregation : {Aggregation::streaming, Aggregation::at_once}) {
    std::vector<std::uint32_t> order(kRanks);
    std::iota(order.begin(), order.end(), 0u);
    do {
      Collecting job(kRanks, {aggregation, ReduceOrder::rank});
      for (std::uint64_t step = 1; step <= 2; ++step) {
        for (const std::uint32_t rank : order) {
          if (rank == 0 && step == 1) ASSERT_TRUE(set_rule(job.shard, rule_with("digits"), kRanks).ok());
          ASSERT_TRUE(job.push(rank, step, Floats(333, static_cast<float>(rank + step))).ok());
        }
        for (std::uint32_t rank = 0; rank < kRanks; ++rank)
          ASSERT_EQ(job.last(rank), Floats(333, step == 1 ? 1234 : 2345)) << "step " << step;
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(Aggregators, ChangeFromStepToStep) {
  Collecting job(3);
  std::uint64_t step = 0;
  for (const char* aggregator : {"sum", "digits", "median", "sum", "digits"}) {
    ++step;
    for (const std::uint32_t rank : {2u, 1u, 0u}) {
      if (rank == 0) ASSERT_TRUE(set_rule(job.shard, rule_with(aggregator), 3, 0, step).ok());
      ASSERT_TRUE(job.push(rank, step, Floats{static_cast<float>(rank == 2 ? 9 : rank)}).ok());
    }
    const std::string name = aggregator;
    EXPECT_EQ(job.last(1), Floats{name == "sum" ? 10.F / 3 : name == "digits" ? 19.F : 1.F}) << name << ", " << step;
  }
}

TEST(Aggregators, WorkOnEveryFloatingPointType) {
  Collecting job(3);
  ASSERT_TRUE(set_rule(job.shard, rule_with("median"), 3).ok());
  std::uint64_t step = 0;
  const auto median_of = [&](DType dtype, auto one, auto two, auto three) {
    using T = decltype(one);
    ++step;
    const std::vector<T> values{one, two, three};
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      auto header = job.header(rank, step);
      header.dtype = dtype;
      EXPECT_TRUE(job.push(header, std::vector<T>(5, values[rank])).ok());
    }
    return job.last<T>(0);
  };
  EXPECT_EQ(median_of(DType::float32, 3.F, -1.F, 2.F), Floats(5, 2.F));
  EXPECT_EQ(median_of(DType::float64, 1e300, -1.0, 2.5), std::vector<double>(5, 2.5));
  // 1, 2 and 3 in the bits of the two types.
  using Bits = std::uint16_t;
  EXPECT_EQ(median_of(DType::float16, Bits{0x4200}, Bits{0x3c00}, Bits{0x4000}), std::vector<Bits>(5, 0x4000));
  EXPECT_EQ(median_of(DType::bfloat16, Bits{0x4040}, Bits{0x3f80}, Bits{0x4000}), std::vector<Bits>(5, 0x4000));
}

TEST(Aggregators, MakeTheGradientOfAnUpdate) {
  Collecting job(3);
  const Floats begin{1, 2};
  const auto assign = with_size(header_of(wire::Kind::assign, 0, 3), begin.size() * sizeof(float));
  ASSERT_TRUE(job.shard.assign(assign, bytes_of(begin)).ok());
  UpdateRule rule = rule_with("median", testing::rule_of("sgd", {{"lr", 0.5}}));
  rule.keeps_gradient = true;
  ASSERT_TRUE(set_rule(job.shard, rule, 3).ok());
  for (const std::uint32_t rank : {1u, 2u, 0u})
    ASSERT_TRUE(job.push(rank, 1, {rank == 1 ? 1000.F : 2.F, static_cast<float>(rank)}).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(job.last(rank), (Floats{0, 1.5}));
  wire::Pull pull;
  pull.array = kGradientArray;
  ASSERT_TRUE(job.shard.pull(pull.make(header_of(wire::Kind::pull, 0, 3)), job.workers[0]).ok());
  EXPECT_EQ(job.last(0), (Floats{2, 1})) << "what the aggregator has made is the mean gradient";
}

TEST(Aggregators, CountAnAbsentRankAsZeros) {
  Collecting job(3);
  ASSERT_TRUE(set_rule(job.shard, rule_with("digits"), 3).ok());
  ASSERT_TRUE(job.push_absent(1, 1).ok());
  ASSERT_TRUE(job.push(2, 1, {7, 8}).ok());
  ASSERT_TRUE(job.push(0, 1, {3, 4}).ok());
  EXPECT_EQ(job.last(1), (Floats{307, 408}));
  for (std::uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(job.push_absent(rank, 2).ok());
  EXPECT_TRUE(wire::StepResult::read(job.workers[0].sent.back().header).absent) << "nobody has contributed";
}

TEST(Aggregators, AreDividedByWhatAMeanIsDividedByBesideTheRanks) {
  Collecting job(2);
  ASSERT_TRUE(set_rule(job.shard, rule_with("digits"), 2).ok());
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    auto header = job.header(rank, 1);
    header.divisor = 8;
    ASSERT_TRUE(job.push(header, Floats{2}).ok());
  }
  EXPECT_EQ(job.last(0), Floats{22.F / 4});
}

TEST(Aggregators, TakeThePlaceOfWideAggregation) {
  Loop loop("shard");
  std::vector<testing::RecordingRequester> workers(2);
  WideAggregation wide(2);
  std::unique_ptr<Shard> shard;
  const Bytes sent = bytes_of(Floats(100, 4));
  loop.call([&] {
    shard = std::make_unique<Shard>(2, Reduction{}, ShardThreads{&loop, &wide});
    EXPECT_TRUE(set_rule(*shard, rule_with("digits"), 2).ok());
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto push = with_size(stored_push_of(rank, 2), sent.size());
      push.divisor = 2;
      EXPECT_TRUE(shard->add(push, workers[rank], sent, [] {}).ok());
    }
    EXPECT_EQ(values_of(workers[1].sent.back().payload), Floats(100, 44));
    shard.reset();
  });
  loop.stop();
}

/// No step ends with a rule that the server cannot use: what it keeps stays as it was.
TEST(Aggregators, ThatServersDoNotKnowAreRefusedAndNothingIsApplied) {
  Collecting job(2);
  const Floats begin{5, 6};
  const auto assign = with_size(header_of(wire::Kind::assign, 0, 2), begin.size() * sizeof(float));
  ASSERT_TRUE(job.shard.assign(assign, bytes_of(begin)).ok());
  const Status status = set_rule(job.shard, rule_with("mode"), 2);
  expect_refused(status, "no aggregator 'mode', but sum, median");
  expect_refused(status, "register_aggregator");
  for (const std::uint32_t rank : {1u, 0u}) ASSERT_TRUE(job.push(rank, 1, {1, 2}).ok());
  for (const auto& worker : job.workers) {
    ASSERT_EQ(worker.refusals.size(), 1u);
    expect_refused(worker.refusals[0], "'mode'");
    EXPECT_TRUE(worker.sent.empty());
  }
  ASSERT_TRUE(job.shard.pull(wire::Pull{}.make(header_of(wire::Kind::pull, 0, 2)), job.workers[0]).ok());
  EXPECT_EQ(job.last(0), begin);
}

TEST(Aggregators, RefuseWhatIsNoMeanOfDenseFloatingPointParts) {
  Collecting job(2);
  ASSERT_TRUE(set_rule(job.shard, rule_with("median"), 2).ok());
  std::uint64_t step = 0;
  const auto expect_no_step = [&](const auto& change) {
    ++step;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto header = job.header(rank, step);
      change(header);
      ASSERT_TRUE(job.push(header, Floats{1, 2}).ok());
    }
    for (auto& worker : job.workers) {
      ASSERT_EQ(worker.refusals.size(), step);
      expect_refused(worker.refusals.back(), "median takes the place of a mean");
    }
  };
  expect_no_step([](auto& header) { header.divisor = 1; });
  expect_no_step([](auto& header) { header.divisor = 3; });
  expect_no_step([](auto& header) {
    header.dtype = DType::int32;
    header.divisor = 1;
  });
  expect_no_step([](auto& header) { header = testing::factors_of(header, 1, 1, 1); });
}

TEST(Aggregators, NeedConsistencyBspAndRankOrder) {
  for (const wire::Pace& pace : {testing::stale(2), testing::asynchronous()}) {
    testing::PacedShard job(2, pace);
    expect_refused(set_rule(job.shard, rule_with("median"), 2), "use consistency=bsp");
    expect_refused(set_rule(job.shard, rule_with("median"), 2, 1), "use consistency=bsp");
  }
  Collecting job(2, {Aggregation::streaming, ReduceOrder::arrival});
  expect_refused(set_rule(job.shard, rule_with("median"), 2), "use reduce_order=rank");
  EXPECT_TRUE(set_rule(job.shard, rule_with("sum"), 2).ok());
}

/// stragglers=drop: the aggregate is over the ranks that were in time, and late ranks get the same.
TEST(Aggregators, LeaveOutLateRanks) {
  constexpr std::uint32_t kRanks = 5;
  testing::PacedShard job(kRanks, testing::dropping());
  const auto stored = [&](std::uint32_t rank, std::uint64_t step) {
    auto header = job.header(rank, step);
    header.stored = true;
    return header;
  };
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    ASSERT_TRUE(set_rule(job.shard, rule_with("digits"), kRanks, rank).ok());
  for (std::uint64_t step = 1; step <= 10; ++step)
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(job.push(stored(rank, step), Floats{1}).ok());
  for (const std::uint32_t rank : {4u, 1u}) ASSERT_TRUE(job.push(stored(rank, 11), Floats(7, 1.F + rank)).ok());
  auto catches_up = absent_of(stored(3, 11));
  catches_up.excluded_from_mean = true;
  ASSERT_TRUE(job.shard.add(catches_up, job.workers[3], {}, nullptr).ok());
  ASSERT_TRUE(job.shard.add(absent_of(stored(2, 11)), job.workers[2], {}, nullptr).ok());
  job.time_passes();
  for (const std::uint32_t rank : {1u, 2u, 3u, 4u}) {
    ASSERT_TRUE(job.answered(rank, 11)) << rank;
    EXPECT_EQ(job.result(rank), Floats(7, 205)) << "ranks 1, 2 with zeros, and 4";
  }
  EXPECT_FALSE(job.answered(0, 11));
  ASSERT_TRUE(job.push(stored(0, 11), Floats(7, 9)).ok());
  EXPECT_EQ(job.result(0), Floats(7, 205));
}

TEST(Aggregators, RefuseAStepThatHasNoRoom) {
  constexpr std::size_t kElements = 1u << 16;
  Collecting job(4, {}, 3 * kElements * sizeof(float));
  ASSERT_TRUE(set_rule(job.shard, rule_with("median"), 4).ok());
  Status status;
  for (std::uint32_t rank = 0; rank < 4 && status.ok(); ++rank)
    status = job.push(rank, 1, Floats(kElements, static_cast<float>(rank)));
  expect_refused(status, "memory_limit");
}

TEST(Aggregators, SurviveALeavingRank) {
  Collecting job(2);
  ASSERT_TRUE(set_rule(job.shard, rule_with("digits"), 2).ok());
  ASSERT_TRUE(job.push(0, 1, {1}).ok());
  job.shard.drop(job.workers[0]);
  ASSERT_TRUE(job.push(1, 1, {2}).ok());
  ASSERT_TRUE(job.push(0, 1, {3}).ok()) << "nothing had been added, so the rank can come back";
  EXPECT_EQ(job.last(1), Floats{32});
}

}  // namespace
}  // namespace poseidon
