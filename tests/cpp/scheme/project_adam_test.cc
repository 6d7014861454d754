// project_adam: the bits of its results, and the bytes of its messages.
#include <gtest/gtest.h>

#include <vector>

#include "cpp/scheme/matrix_exchange.h"
#include "poseidon/plan.h"
#include "wire/header.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kAdamRows = 12;
constexpr std::size_t kAdamCols = 20;
constexpr std::size_t kAdamWorkers = 3;

class ProjectAdamTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(job_.unit().chunks.size(), 1u) << "the matrix lies whole on one server core"; }

  MatrixExchange job_{matrix_layer("weight", kAdamRows, kAdamCols, Scheme::project_adam), kAdamWorkers, 256};
};

TEST_F(ProjectAdamTest, TheMeanOfAllFactorsHasTheBitsOfTheSumInRankOrder) {
  for (int step = 0; step < 3; ++step) job_.expect_mean({job_.factors({1}), job_.factors({5}), job_.factors({2})});
}

TEST_F(ProjectAdamTest, ARankMayContributeADenseGradientOrNothing) {
  job_.expect_mean({job_.factors({2}), job_.dense(), job_.factors({3})});
  job_.expect_mean({job_.nothing(), job_.factors({2}), job_.dense()});
}

TEST_F(ProjectAdamTest, WhereNobodyContributesNothingIsTouched) {
  for (const Floats& result : job_.exchange({{}, {}, {}})) EXPECT_EQ(result, Floats(kAdamRows * kAdamCols, 7));
  EXPECT_FALSE(job_.client(0).layer_stats(job_.id()).present);
}

TEST_F(ProjectAdamTest, TheBytesAreThoseOfTheClosedForm) {
  constexpr std::size_t factor_count = 4;
  const SchemeCost cost =
      traits_of(Scheme::project_adam)
          .cost(kAdamRows, kAdamCols, factor_count, {kAdamWorkers, kAdamWorkers, Placement::colocated});
  std::vector<std::uint64_t> before(kAdamWorkers);
  const auto traffic_of = [](const Client& client) {
    return client.traffic().bytes_sent + client.traffic().bytes_received;
  };
  for (std::size_t rank = 0; rank < kAdamWorkers; ++rank) before[rank] = traffic_of(job_.client(rank));
  job_.exchange({job_.factors({factor_count}), job_.factors({factor_count}), job_.factors({factor_count})});
  for (std::size_t rank = 0; rank < kAdamWorkers; ++rank) {
    const LayerStats stats = job_.client(rank).layer_stats(job_.id());
    const bool owns = rank == static_cast<std::size_t>(job_.unit().chunks.front().server);
    const std::size_t factor_bytes = factor_count * (kAdamRows + kAdamCols) * sizeof(float);
    EXPECT_EQ(stats.bytes_sent, owns ? 0 : wire::kHeaderBytes + factor_bytes) << rank;
    EXPECT_EQ(stats.bytes_received, owns ? 0 : wire::kHeaderBytes + kAdamRows * kAdamCols * sizeof(float)) << rank;
    // A push and a result for each worker that does not own the matrix.
    const std::size_t message_count = 2 * (owns ? kAdamWorkers - 1 : 1);
    const auto numbers = static_cast<std::uint64_t>(owns ? cost.server_and_worker : cost.worker);
    EXPECT_EQ(traffic_of(job_.client(rank)) - before[rank],
              message_count * wire::kHeaderBytes + numbers * sizeof(float))
        << rank;
  }
}

TEST_F(ProjectAdamTest, TheServerMultipliesSoWorkersNeitherAccumulateNorConvert) {
  Client& client = job_.client(0);
  const MatrixGradient own = job_.factors({1});
  Floats memory(kAdamRows * kAdamCols);
  constexpr auto divisor = MatrixExchange::kDivisor;
  const Status accumulated =
      client.start_factors(job_.id(), DType::float32, own.rows(), bytes_of(memory), divisor, true);
  EXPECT_EQ(accumulated.code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(accumulated, "accumulate")) << accumulated.message();
  const Status narrow = client.start_factors(job_.id(), DType::bfloat16, own.rows(), bytes_of(memory), divisor, false);
  EXPECT_EQ(narrow.code(), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace poseidon::testing
