// powersgd: its results beside a slow computation in double precision, equal bits on all ranks, and its bytes.
#include <cmath>
#include <limits>
#include <numeric>

#include "cpp/scheme/lossy_cases.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kRows = 60;
constexpr std::size_t kCols = 45;
constexpr std::size_t kRank = 3;
constexpr std::size_t kWorkers = 3;

using Doubles = std::vector<double>;

Layer powersgd_layer(std::size_t rows = kRows, std::size_t cols = kCols, std::size_t rank = kRank) {
  Layer layer = vector_layer("layer", rows * cols, DType::float32, Scheme::powersgd);
  layer.compression.rows = rows;
  layer.compression.powersgd_rank = rank;
  return layer;
}

/// The algorithm of the paper for all workers at once.
class SlowPowerSgd {
 public:
  Doubles step(const std::vector<Floats>& gradients, Doubles right) {
    Doubles left(kRank * kRows);
    for (std::size_t worker = 0; worker < kWorkers; ++worker)
      for (std::size_t i = 0; i < kRows * kCols; ++i) residuals_[worker][i] += double{gradients[worker][i]};
    for (const Doubles& matrix : residuals_)
      for (std::size_t k = 0; k < kRank; ++k)
        for (std::size_t i = 0; i < kRows; ++i)
          for (std::size_t j = 0; j < kCols; ++j) left[k * kRows + i] += matrix[i * kCols + j] * right[k * kCols + j];
    orthonormalize(left);
    Doubles result(kRows * kCols);
    for (Doubles& matrix : residuals_) {
      Doubles own(kRank * kCols);
      for (std::size_t k = 0; k < kRank; ++k)
        for (std::size_t i = 0; i < kRows; ++i)
          for (std::size_t j = 0; j < kCols; ++j) own[k * kCols + j] += matrix[i * kCols + j] * left[k * kRows + i];
      for (std::size_t i = 0; i < kRows; ++i) {
        for (std::size_t j = 0; j < kCols; ++j) {
          double part = 0;
          for (std::size_t k = 0; k < kRank; ++k) part += left[k * kRows + i] * own[k * kCols + j];
          result[i * kCols + j] += part;
          matrix[i * kCols + j] -= part;
        }
      }
    }
    return result;
  }
  const Doubles& residual(std::size_t worker) const { return residuals_[worker]; }

 private:
  static void orthonormalize(Doubles& left) {
    for (std::size_t k = 0; k < kRank; ++k) {
      double* const vector = left.data() + k * kRows;
      for (std::size_t other = 0; other < k; ++other) {
        const double* const base = left.data() + other * kRows;
        const double part = std::inner_product(vector, vector + kRows, base, 0.0);
        for (std::size_t i = 0; i < kRows; ++i) vector[i] -= part * base[i];
      }
      const double length = std::sqrt(std::inner_product(vector, vector + kRows, vector, 0.0));
      for (std::size_t i = 0; i < kRows; ++i) vector[i] /= length;
    }
  }

  std::vector<Doubles> residuals_ = std::vector<Doubles>(kWorkers, Doubles(kRows* kCols));
};

/// The right vectors that a client keeps, behind the residual.
Doubles right_of(Client& client, std::uint32_t layer) {
  const Floats kept = floats_of(client.residual(layer));
  return {kept.begin() + static_cast<std::ptrdiff_t>(kRows * kCols), kept.end()};
}

/// One step of all ranks, which must get the same bits.
Floats exchange(TestCluster& cluster, std::uint32_t layer, const Step& step, std::uint32_t divisor) {
  std::vector<Floats> results(step.size());
  cluster.each([&](std::size_t rank, Client& client) {
    EXPECT_EQ(client.next_scheme(layer), Scheme::powersgd);
    Floats& memory = results[rank] = step[rank].value_or(Floats(kRows * kCols, 5));
    Status status = step[rank] ? client.start(layer, bytes_of(memory), divisor)
                               : client.start_absent(layer, bytes_of(memory), divisor);
    EXPECT_TRUE(status.ok()) << status.message();
    status = client.wait(layer, always);
    EXPECT_TRUE(status.ok()) << status.message();
  });
  for (const Floats& result : results) EXPECT_TRUE(same_bits(result, results[0]));
  return results[0];
}

class PowerSgd : public ::testing::Test {
 protected:
  Step random_step() {
    Step step;
    for (std::size_t rank = 0; rank < kWorkers; ++rank) step.emplace_back(random_floats(random_, kRows * kCols));
    return step;
  }
  Client& client(std::size_t rank) { return *cluster_.clients[rank]; }

  TestCluster cluster_{LossyJob::over_tcp(kWorkers)};
  std::uint32_t layer_ = cluster_.add({powersgd_layer()});
  std::mt19937 random_{5};
};

TEST_F(PowerSgd, FollowsTheSlowComputationOverManySteps) {
  SlowPowerSgd slow;
  exchange(cluster_, layer_, Step(kWorkers), 1);  // nobody has a gradient, and the first right vectors are there
  for (int number = 0; number < 6; ++number) {
    const Step step = random_step();
    std::vector<Floats> gradients;
    for (const auto& one : step) gradients.push_back(*one);
    const Doubles expected = slow.step(gradients, right_of(client(0), layer_));
    const Floats got = exchange(cluster_, layer_, step, 3);
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i] / 3, 2e-5) << "step " << number;
    for (std::size_t rank = 0; rank < kWorkers; ++rank) {
      const Floats kept = floats_of(client(rank).residual(layer_));
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(kept[i], slow.residual(rank)[i], 1e-4);
      EXPECT_EQ(right_of(client(rank), layer_), right_of(client(0), layer_));
    }
  }
}

TEST_F(PowerSgd, AMatrixOfLowRankArrivesWhole) {
  Floats matrix(kRows * kCols);
  for (std::size_t i = 0; i < matrix.size(); ++i)
    matrix[i] = static_cast<float>(i / kCols) * 0.1F - static_cast<float>(i % kCols);
  const Floats got = exchange(cluster_, layer_, {matrix, std::nullopt, matrix}, 2);
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], matrix[i], 1e-3);
}

TEST_F(PowerSgd, AbsentRanksGetTheResultAndKeepWhatTheyHave) {
  exchange(cluster_, layer_, random_step(), 3);
  const Floats before = floats_of(client(1).residual(layer_));
  Step step = random_step();
  step[1].reset();
  exchange(cluster_, layer_, step, 3);
  const Floats after = floats_of(client(1).residual(layer_));
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + kRows * kCols, after.begin()));
  EXPECT_EQ(exchange(cluster_, layer_, Step(kWorkers), 3), Floats(kRows * kCols, 5));
  EXPECT_FALSE(client(0).layer_stats(layer_).present);
  exchange(cluster_, layer_, Step{Floats(kRows * kCols), Floats(kRows * kCols), Floats(kRows * kCols)}, 3);
  exchange(cluster_, layer_, random_step(), 3);
}

TEST_F(PowerSgd, ABadValueReachesEveryRankAndNothingThatIsKept) {
  exchange(cluster_, layer_, random_step(), 3);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const Floats before = floats_of(client(0).residual(layer_));
    Step step = random_step();
    (*step[2])[77] = bad;
    EXPECT_TRUE(std::isnan(exchange(cluster_, layer_, step, 3)[0]));
    const Floats after = floats_of(client(0).residual(layer_));
    EXPECT_TRUE(std::equal(before.begin(), before.begin() + kRows * kCols, after.begin()));
  }
  for (const float value : exchange(cluster_, layer_, random_step(), 3)) ASSERT_TRUE(std::isfinite(value));
}

TEST_F(PowerSgd, OfAnExchangeThatFailsNothingIsKept) {
  exchange(cluster_, layer_, random_step(), 3);
  EXPECT_FALSE(client(0).residual(layer_).empty());
  Floats memory = *random_step()[0];
  ASSERT_TRUE(client(0).start(layer_, bytes_of(memory), 3).ok());
  EXPECT_FALSE(client(0).residual(layer_).empty());  // asked on the loop, so the exchange has begun there
  client(1).abort("on purpose");
  EXPECT_FALSE(client(0).wait_all(always).ok());
  EXPECT_TRUE(client(0).residual(layer_).empty()) << "its part may be in the sum of the others";
  EXPECT_FALSE(client(2).residual(layer_).empty()) << "it had not begun";
}

TEST_F(PowerSgd, TheBytesAreThoseOfTheClosedForm) {
  const Layer large = powersgd_layer(3000, 2000, 4);
  const std::uint32_t id = cluster_.add({large});
  const Cluster cluster{kWorkers, kWorkers, Placement::colocated};
  cluster_.each([&](std::size_t, Client& client) {
    Floats memory(large.element_count, 1);
    ASSERT_TRUE(client.start(id, bytes_of(memory), 3).ok());
    ASSERT_TRUE(client.wait(id, always).ok());
    EXPECT_NEAR(memory[5], 1.0F, 1e-3);
    const LayerStats stats = client.layer_stats(id);
    // The worker's own pushes and results; its server moves as much for the others.
    const double cost = layer_cost(large, Scheme::powersgd, 0, cluster).busiest(cluster) * sizeof(float);
    EXPECT_NEAR(cost, 4.0 * 2 / 3 * 4 * 5000 * 4, 1);
    EXPECT_NEAR(static_cast<double>(stats.bytes_sent + stats.bytes_received), cost / 2, 0.01 * cost / 2);
  });
}

TEST(PowerSgdPlan, CompressesMatricesThatBecomeMuchSmaller) {
  const Cluster cluster{4, 4, Placement::colocated};
  const auto scheme_of = [&](const Layer& layer) {
    return make_plan({layer}, cluster, {}, 0).value().layers[0].scheme;
  };
  EXPECT_EQ(scheme_of(powersgd_layer(300, 200, 4)), Scheme::powersgd);
  EXPECT_EQ(scheme_of(powersgd_layer(300, 200, 100)), Scheme::ps);
  Layer vector = powersgd_layer(300, 200, 4);
  vector.compression.rows = 0;
  EXPECT_EQ(scheme_of(vector), Scheme::ps);
  vector.compression.rows = 7;
  EXPECT_FALSE(make_plan({vector}, cluster, {}, 0).ok());
  Layer open = matrix_layer("open", 300, 200);
  open.compression.allowed = Scheme::powersgd;
  open.compression.rows = 300;
  EXPECT_EQ(best_scheme(open, 0, cluster), Scheme::powersgd);
  EXPECT_EQ(best_scheme(open, 1, cluster), Scheme::sfb);
}

}  // namespace
}  // namespace poseidon::testing
