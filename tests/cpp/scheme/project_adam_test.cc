// project_adam: the bits of its results, and the bytes of its messages.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/plan.h"
#include "wire/header.h"

namespace poseidon::testing {
namespace {

using Floats = std::vector<float>;

constexpr std::size_t kRows = 12;
constexpr std::size_t kCols = 20;
constexpr std::size_t kWorkers = 3;
constexpr std::uint32_t kDivisor = 3;

/// What one rank contributes: K rows of factors, a dense gradient, or nothing.
struct Gradient {
  std::size_t factor_count = 0;
  Floats left;
  Floats right;
  Floats dense;

  bool has_factors() const { return factor_count > 0; }
};

Floats random_floats(std::mt19937& random, std::size_t count) {
  std::uniform_real_distribution<float> values(-1, 1);
  Floats floats(count);
  for (float& value : floats) value = values(random);
  return floats;
}

Gradient factors(std::mt19937& random, std::size_t factor_count) {
  return {factor_count, random_floats(random, factor_count * kRows), random_floats(random, factor_count * kCols), {}};
}

/// The mean, as one chain of operations in rank order for each element.
Floats mean_in_rank_order(const std::vector<Gradient>& gradients) {
  Floats mean(kRows * kCols);
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t col = 0; col < kCols; ++col) {
      float sum = 0;
      for (const Gradient& one : gradients) {
        if (!one.dense.empty()) sum += one.dense[row * kCols + col];
        for (std::size_t k = 0; k < one.factor_count; ++k)
          sum = std::fma(one.left[k * kRows + row], one.right[k * kCols + col], sum);
      }
      mean[row * kCols + col] = sum / kDivisor;
    }
  }
  return mean;
}

/// Shared memory would not count as network traffic.
std::vector<Options> over_tcp() {
  auto options = cluster_options(kWorkers);
  for (Options& one : options) one.transport = Medium::tcp;
  return options;
}

class ProjectAdamTest : public ::testing::Test {
 protected:
  ProjectAdamTest() {
    const std::vector<Layer> layers{matrix_layer("weight", kRows, kCols, Scheme::project_adam)};
    cluster_.each([&](std::size_t rank, Client& client) {
      auto added = client.add_layers(layers, false, always);
      ASSERT_TRUE(added.ok()) << added.status().message();
      if (rank != 0) return;
      layer_ = added.value().first_layer;
      const auto& chunks = added.value().plan.units.front().chunks;
      ASSERT_EQ(chunks.size(), 1u) << "the matrix lies whole on one server core";
      owner_ = static_cast<std::size_t>(chunks.front().server);
    });
  }

  /// One step. Returns what each rank received.
  std::vector<Floats> exchange(const std::vector<Gradient>& gradients) {
    std::vector<Floats> results(kWorkers);
    cluster_.each([&](std::size_t rank, Client& client) {
      EXPECT_EQ(client.next_scheme(layer_), Scheme::project_adam);
      const Gradient& own = gradients[rank];
      results[rank] = own.dense.empty() ? Floats(kRows * kCols, 7) : own.dense;
      const auto memory = bytes_of(results[rank]);
      Status status;
      if (own.has_factors())
        status = client.start_factors(
            layer_, DType::float32,
            {{std::as_bytes(std::span(own.left)).data(), std::as_bytes(std::span(own.right)).data(), own.factor_count}},
            memory, kDivisor, false);
      else if (!own.dense.empty())
        status = client.start(layer_, memory, kDivisor);
      else
        status = client.start_absent(layer_, memory, kDivisor);
      ASSERT_TRUE(status.ok()) << status.message();
      status = client.wait(layer_, always);
      EXPECT_TRUE(status.ok()) << status.message();
    });
    return results;
  }

  void expect_mean(const std::vector<Gradient>& gradients) {
    const Floats mean = mean_in_rank_order(gradients);
    for (const Floats& result : exchange(gradients)) EXPECT_EQ(result, mean);
  }

  TestCluster cluster_{over_tcp()};
  std::uint32_t layer_ = 0;
  std::size_t owner_ = 0;
  std::mt19937 random_{1};
};

TEST_F(ProjectAdamTest, TheMeanOfAllFactorsHasTheBitsOfTheSumInRankOrder) {
  for (int step = 0; step < 3; ++step) expect_mean({factors(random_, 1), factors(random_, 5), factors(random_, 2)});
}

TEST_F(ProjectAdamTest, ARankMayContributeADenseGradientOrNothing) {
  expect_mean({factors(random_, 2), {0, {}, {}, random_floats(random_, kRows * kCols)}, factors(random_, 3)});
  expect_mean({{}, factors(random_, 2), {0, {}, {}, random_floats(random_, kRows * kCols)}});
}

TEST_F(ProjectAdamTest, WhereNobodyContributesNothingIsTouched) {
  for (const Floats& result : exchange({{}, {}, {}})) EXPECT_EQ(result, Floats(kRows * kCols, 7));
  EXPECT_FALSE(cluster_.clients[0]->layer_stats(layer_).present);
}

TEST_F(ProjectAdamTest, TheBytesAreThoseOfTheClosedForm) {
  constexpr std::size_t factor_count = 4;
  const SchemeCost cost =
      traits_of(Scheme::project_adam).cost(kRows, kCols, factor_count, {kWorkers, kWorkers, Placement::colocated});
  std::vector<std::uint64_t> before(kWorkers);
  const auto traffic_of = [](const Client& client) {
    return client.traffic().bytes_sent + client.traffic().bytes_received;
  };
  for (std::size_t rank = 0; rank < kWorkers; ++rank) before[rank] = traffic_of(*cluster_.clients[rank]);
  exchange({factors(random_, factor_count), factors(random_, factor_count), factors(random_, factor_count)});
  for (std::size_t rank = 0; rank < kWorkers; ++rank) {
    const LayerStats stats = cluster_.clients[rank]->layer_stats(layer_);
    const bool owns = rank == owner_;
    const std::size_t factor_bytes = factor_count * (kRows + kCols) * sizeof(float);
    EXPECT_EQ(stats.bytes_sent, owns ? 0 : wire::kHeaderBytes + factor_bytes) << rank;
    EXPECT_EQ(stats.bytes_received, owns ? 0 : wire::kHeaderBytes + kRows * kCols * sizeof(float)) << rank;
    // A push and a result for each worker that does not own the matrix.
    const std::size_t message_count = 2 * (owns ? kWorkers - 1 : 1);
    const auto numbers = static_cast<std::uint64_t>(owns ? cost.server_and_worker : cost.worker);
    EXPECT_EQ(traffic_of(*cluster_.clients[rank]) - before[rank],
              message_count * wire::kHeaderBytes + numbers * sizeof(float))
        << rank;
  }
}

TEST_F(ProjectAdamTest, TheServerMultipliesSoWorkersNeitherAccumulateNorConvert) {
  Client& client = *cluster_.clients[0];
  const Gradient own = factors(random_, 1);
  Floats memory(kRows * kCols);
  const std::vector<FactorRows> rows{
      {std::as_bytes(std::span(own.left)).data(), std::as_bytes(std::span(own.right)).data(), 1}};
  const Status accumulated = client.start_factors(layer_, DType::float32, rows, bytes_of(memory), kDivisor, true);
  EXPECT_EQ(accumulated.code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(accumulated, "accumulate")) << accumulated.message();
  const Status narrow = client.start_factors(layer_, DType::bfloat16, rows, bytes_of(memory), kDivisor, false);
  EXPECT_EQ(narrow.code(), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace poseidon::testing
