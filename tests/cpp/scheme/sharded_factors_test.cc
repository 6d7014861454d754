// sharded_factors: the bits of its results, and the bytes of its messages. It has the code of project_adam, whose tests
// say the rest.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpp/scheme/matrix_exchange.h"
#include "kernel/kernel.h"
#include "poseidon/plan.h"
#include "scheme/scheme.h"
#include "wire/header.h"
#include "wire/messages/contribution.h"

namespace poseidon::testing {
namespace {

constexpr int kWorkerCount = 3;
constexpr std::size_t kChunkBytes = 256;

Layer layer_of(std::size_t rows, std::size_t cols, WireFormat wire = WireFormat::fp32) {
  Layer layer = matrix_layer("weight", rows, cols, Scheme::sharded_factors);
  layer.wire = wire;
  return layer;
}

float as_bfloat16(float value) {
  std::byte encoded[2];
  kernel::encode(DType::bfloat16, &value, encoded, 1);
  kernel::decode(DType::bfloat16, encoded, &value, 1);
  return value;
}

/// Rows × columns: tall and wide, square, and sizes that no number of servers divides.
class ShardedFactors : public ::testing::TestWithParam<std::tuple<std::size_t, std::size_t>> {
 protected:
  std::size_t rows() const { return std::get<0>(GetParam()); }
  std::size_t cols() const { return std::get<1>(GetParam()); }

  /// Steps with lists of different lengths, none at all, K = 0, and gradients that are dense.
  static std::vector<MatrixExchange::Gradients> steps(MatrixExchange& job) {
    return {{job.factors({1}), job.factors({5}), job.factors({2})},
            {job.factors({2, 0, 3}), job.factors({1, 1, 1}), job.factors({4})},
            {job.factors({0}), job.nothing(), job.factors({2})},
            {job.dense(), job.factors({2}), job.dense()},
            {job.nothing(), job.dense(), job.factors({3})},
            {job.dense(), job.dense(), job.dense()},
            {job.factors({0}), job.factors({0}), job.factors({0})}};
  }
};

TEST_P(ShardedFactors, TheMeanHasTheBitsOfTheSumInRankOrder) {
  MatrixExchange job(layer_of(rows(), cols()), kWorkerCount, kChunkBytes);
  ASSERT_EQ(job.unit().blocks.size(), static_cast<std::size_t>(kWorkerCount));
  for (const auto& gradients : steps(job)) job.expect_mean(gradients);
}

TEST_P(ShardedFactors, WithFewerBitsFactorsAndMeanAreRoundedOnce) {
  for (const WireFormat wire : {WireFormat::bf16, WireFormat::int8}) {  // factors need the 16 bits of bf16
    MatrixExchange job(layer_of(rows(), cols(), wire), kWorkerCount, kChunkBytes);
    for (const auto& gradients : steps(job)) {
      const Floats mean = job.mean_in_rank_order(gradients, as_bfloat16);
      for (const Floats& result : job.exchange(gradients)) EXPECT_EQ(result, mean);
    }
  }
}

TEST_P(ShardedFactors, WhereNobodyContributesNothingIsTouched) {
  MatrixExchange job(layer_of(rows(), cols()), kWorkerCount, kChunkBytes);
  for (const Floats& result : job.exchange({{}, {}, {}})) EXPECT_EQ(result, Floats(rows() * cols(), 7));
  EXPECT_FALSE(job.client(0).layer_stats(job.id()).present);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShardedFactors,
                         ::testing::Values(std::tuple(31, 8), std::tuple(8, 31), std::tuple(16, 16), std::tuple(200, 1),
                                           std::tuple(1, 200)));

TEST(ShardedFactorsBytes, AreThoseOfTheClosedForm) {
  constexpr std::size_t rows = 24;
  constexpr std::size_t cols = 60;  // a multiple of the number of servers, so that all blocks are equal
  constexpr std::size_t factor_count = 4;
  MatrixExchange job(layer_of(rows, cols), kWorkerCount, kChunkBytes);
  const SchemeCost cost = traits_of(Scheme::sharded_factors)
                              .cost(rows, cols, factor_count, {kWorkerCount, kWorkerCount, Placement::colocated});
  std::vector<std::uint64_t> before;
  const auto traffic_of = [](const Client& client) {
    return client.traffic().plain_bytes_sent + client.traffic().plain_bytes_received;
  };
  for (std::size_t rank = 0; rank < kWorkerCount; ++rank) before.push_back(traffic_of(job.client(rank)));
  job.exchange({job.factors({factor_count}), job.factors({factor_count}), job.factors({factor_count})});
  for (std::size_t rank = 0; rank < kWorkerCount; ++rank) {
    constexpr std::size_t others = kWorkerCount - 1;
    const LayerStats stats = job.client(rank).layer_stats(job.id());
    EXPECT_EQ(stats.factor_count, kWorkerCount * factor_count);
    EXPECT_EQ(stats.bytes_sent,
              others * (wire::kHeaderBytes + factor_count * (rows + cols / kWorkerCount) * sizeof(float)));
    EXPECT_EQ(stats.bytes_received, others * (wire::kHeaderBytes + rows * cols / kWorkerCount * sizeof(float)));
    EXPECT_EQ(traffic_of(job.client(rank)) - before[rank],
              4 * others * wire::kHeaderBytes + static_cast<std::uint64_t>(cost.server_and_worker) * sizeof(float));
  }
}

/// A worker that awaits blocks 0 and 2 of a 2×4 matrix: the left half of the columns, and the right half.
class ShardedFactorsAnswers : public ::testing::Test {
 protected:
  ShardedFactorsAnswers() {
    unit_.chunks.resize(3);
    unit_.blocks = {{.chunk = 0, .col = 0, .row_count = 2, .col_count = 2},
                    {.chunk = 2, .col = 2, .row_count = 2, .col_count = 2}};
    links_.server_is_local = {true};
    links_.pool = std::make_shared<BufferPool>();
    exchange_.about.unit = &unit_;
    exchange_.about.rows = 2;
    exchange_.about.cols = 4;
    exchange_.on_complete = [] {};
    Push push{.gradient = NoGradient{}, .destination = bytes_of(values_)};
    exchange_.begin(push, scheme_, Scheme::sharded_factors, {});
    ServerAnswers& answers = exchange_.progress.answers.emplace();
    answers.chunks = {ChunkArrival::awaited, ChunkArrival::received, ChunkArrival::awaited};
    answers.missing_count = 2;
  }

  wire::Header result_of(std::uint32_t chunk, std::size_t payload_bytes, bool absent = false) const {
    wire::StepResult result;
    result.absent = absent;
    wire::Header header = result.make({});
    header.step = exchange_.step;
    header.chunk = chunk;
    header.payload_bytes = payload_bytes;
    return header;
  }

  ErrorCode accept(const wire::Header& header) {
    return scheme_.accept(exchange_, header, true, links_).status().code();
  }
  Status receive(std::uint32_t chunk, Floats values, bool absent = false) {
    const wire::Header header = result_of(chunk, values.size() * sizeof(float), absent);
    EXPECT_EQ(accept(header), ErrorCode::ok);
    return scheme_.receive(exchange_, header, bytes_of(values), links_);
  }

  const SchemeProtocol& scheme_ = protocol_of(Scheme::sharded_factors);
  Floats values_ = Floats(8, 7);
  Unit unit_;
  Links links_;
  Exchange exchange_;
};

TEST_F(ShardedFactorsAnswers, MustBeThoseOfABlockThatIsAwaited) {
  EXPECT_EQ(accept(result_of(1, 16)), ErrorCode::mismatch) << "no block";
  EXPECT_EQ(accept(result_of(3, 16)), ErrorCode::mismatch) << "no chunk";
  EXPECT_EQ(accept(result_of(0, 12)), ErrorCode::mismatch) << "another size";
  EXPECT_EQ(accept(result_of(0, 0)), ErrorCode::mismatch) << "no payload";
  wire::Header header = result_of(0, 16);
  ++header.step;
  EXPECT_EQ(accept(header), ErrorCode::mismatch) << "another step";
  wire::StepResult narrow;
  narrow.dtype = DType::bfloat16;
  header = narrow.make(result_of(0, 16));
  EXPECT_EQ(accept(header), ErrorCode::mismatch) << "another type";
  EXPECT_TRUE(receive(2, {1, 2, 3, 4}).ok());
  EXPECT_EQ(accept(result_of(2, 16)), ErrorCode::mismatch) << "twice";
  EXPECT_TRUE(receive(0, {5, 6, 8, 9}).ok());
  EXPECT_EQ(values_, (Floats{5, 6, 1, 2, 8, 9, 3, 4}));
  EXPECT_TRUE(exchange_.progress.received);
}

TEST_F(ShardedFactorsAnswers, HaveAllAResultOrNone) {
  EXPECT_TRUE(receive(0, {1, 2, 3, 4}).ok());
  EXPECT_EQ(receive(2, {}, true).code(), ErrorCode::mismatch);
}

}  // namespace
}  // namespace poseidon::testing
