// onebit: the bits of results and residuals over several steps, the bytes of its messages, and bad values.
#include <cmath>
#include <limits>

#include "cpp/scheme/lossy_cases.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kBlock = 512;

Layer onebit_layer(std::size_t element_count) {
  return vector_layer("layer", element_count, DType::float32, Scheme::onebit);
}

/// The mean of one sign's values in a block, added in 16 lanes, which are then added in order.
float slow_mean(const Floats& sums, std::size_t begin, std::size_t end, bool negative) {
  float lanes[16] = {};
  float count = 0;
  for (std::size_t i = begin; i < end; ++i) {
    if ((sums[i] < 0) != negative) continue;
    lanes[(i - begin) % 16] += sums[i];
    ++count;
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return count > 0 ? sum / count : 0;
}

Floats slow_onebit(const Floats& gradient, Floats& residual) {
  Floats sums(gradient.size());
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = gradient[i] + residual[i];
  Floats part(sums.size());
  for (std::size_t begin = 0; begin < sums.size(); begin += kBlock) {
    const std::size_t end = std::min(sums.size(), begin + kBlock);
    const float negative = slow_mean(sums, begin, end, true);
    const float positive = slow_mean(sums, begin, end, false);
    for (std::size_t i = begin; i < end; ++i) {
      part[i] = sums[i] < 0 ? negative : positive;
      residual[i] = sums[i] - part[i];
    }
  }
  return part;
}

TEST(OneBit, HasTheBitsOfTheSlowComputationOverManySteps) {
  for (const std::size_t size : {1u, 511u, 512u, 513u, 40'000u}) {
    LossyJob job(3, onebit_layer(size), slow_onebit);
    expect_random_steps(job, 3, size, 8);
  }
}

TEST(OneBit, ABadValueReachesEveryRankAndNoResidual) {
  const std::size_t size = 2000;
  LossyJob job(3, onebit_layer(size), slow_onebit);
  std::mt19937 random(8);
  job.expect_step({random_floats(random, size), random_floats(random, size), random_floats(random, size)}, 3);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3e38F}) {
    std::vector<Floats> results(3);
    job.cluster().each([&](std::size_t rank, Client& client) {
      Floats memory(size, 1e-3F);
      if (rank == 1) memory[600] = memory[601] = bad;  // the sum of large values overflows
      ASSERT_TRUE(client.start(job.id(), bytes_of(memory), 3).ok());
      ASSERT_TRUE(client.wait(job.id(), always).ok());
      results[rank] = memory;
    });
    for (const Floats& result : results) {
      EXPECT_TRUE(std::isnan(result[600]));
      EXPECT_TRUE(std::isnan(result[1023])) << "the whole block";
      EXPECT_TRUE(std::isfinite(result[511]) && std::isfinite(result[1024]));
    }
    for (std::size_t rank = 0; rank < 3; ++rank)
      for (const float value : floats_of(job.client(rank).residual(job.id()))) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST(OneBit, TheBytesAreThoseOfTheClosedForm) {
  const std::size_t size = 200'000;
  const std::size_t workers = 4;
  LossyJob job(workers, onebit_layer(size), slow_onebit);
  const Cluster cluster{workers, workers, Placement::colocated};
  job.expect_step({Floats(size, 1), Floats(size, 2), Floats(size, 3), Floats(size, 4)}, 4);
  const double cost = layer_cost(onebit_layer(size), Scheme::onebit, 0, cluster).busiest(cluster) * sizeof(float);
  EXPECT_EQ(cost, 2 * 3 * 391 * 72.0);
  for (std::size_t rank = 0; rank < workers; ++rank) {
    const LayerStats stats = job.client(rank).layer_stats(job.id());
    EXPECT_NEAR(static_cast<double>(stats.bytes_sent + stats.bytes_received), cost, 0.01 * cost);
  }
}

TEST(OneBitPlan, AutoTakesItWhereItIsAllowedAndCheaper) {
  Layer layer = vector_layer("layer", 100'000);
  layer.compression.allowed = Scheme::onebit;
  EXPECT_EQ(best_scheme(layer, 0, {16, 16, Placement::colocated}), Scheme::onebit);
  EXPECT_EQ(best_scheme(layer, 0, {64, 64, Placement::colocated}), Scheme::ps);
}

}  // namespace
}  // namespace poseidon::testing
