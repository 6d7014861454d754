// topk: the bits of results and residuals over several steps, the bytes of its messages, and what it refuses.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpp/scheme/lossy_cases.h"
#include "scheme/peer_broadcast.h"

namespace poseidon::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Layer topk_layer(std::size_t element_count, double fraction = 0.01) {
  Layer layer = vector_layer("layer", element_count, DType::float32, Scheme::topk);
  layer.compression.topk_fraction = fraction;
  return layer;
}

/// Takes the `count` largest of gradient + residual by sorting.
SlowCompression slow_topk(std::size_t count) {
  return [count](const Floats& gradient, Floats& residual) {
    Floats sums(gradient.size());
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = gradient[i] + residual[i];
    std::vector<std::size_t> order(sums.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](auto a, auto b) { return std::fabs(sums[a]) > std::fabs(sums[b]); });
    Floats part(sums.size());
    residual = sums;
    for (std::size_t i = 0; i < count; ++i) {
      part[order[i]] = sums[order[i]];
      residual[order[i]] = 0;
    }
    return part;
  };
}

TEST(TopK, HasTheBitsOfTheSlowComputationOverManySteps) {
  for (const auto& [size, fraction, count] : {std::tuple<std::size_t, double, std::size_t>{1000, 0.01, 10},
                                              {1001, 0.01, 11},
                                              {17, 1.0, 17},
                                              {30'000, 0.1, 3000},
                                              {3, 1e-9, 1}}) {
    LossyJob job(3, topk_layer(size, fraction), slow_topk(count));
    expect_random_steps(job, 3, size, 8);
  }
}

TEST(TopK, SendsEverythingInTheEnd) {
  const std::size_t size = 200;
  LossyJob job(2, topk_layer(size, 0.1), slow_topk(20));
  std::mt19937 random(7);
  const Floats gradient = random_floats(random, size);
  Floats total(size);
  for (int step = 0; step < 10; ++step) {
    // One gradient, and then zeros: the residual is all that is sent.
    Floats memory = step == 0 ? gradient : Floats(size);
    job.cluster().each([&](std::size_t rank, Client& client) {
      Floats own = rank == 0 ? memory : Floats(size);
      ASSERT_TRUE(client.start(job.id(), bytes_of(own), 1).ok());
      ASSERT_TRUE(client.wait(job.id(), always).ok());
      if (rank == 0)
        for (std::size_t i = 0; i < size; ++i) total[i] += own[i];
    });
  }
  EXPECT_EQ(total, gradient);
  EXPECT_EQ(floats_of(job.client(0).residual(job.id())), Floats(size));
}

TEST(TopK, ABadValueReachesEveryRankAndNoResidual) {
  const std::size_t size = 500;
  LossyJob job(3, topk_layer(size), slow_topk(5));
  std::mt19937 random(8);
  job.expect_step({random_floats(random, size), random_floats(random, size), random_floats(random, size)}, 3);
  const Floats before = floats_of(job.client(1).residual(job.id()));
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    std::vector<Floats> results(3);
    job.cluster().each([&](std::size_t rank, Client& client) {
      Floats memory(size, 1e-3F);
      if (rank == 1) memory[77] = bad;
      ASSERT_TRUE(client.start(job.id(), bytes_of(memory), 3).ok());
      ASSERT_TRUE(client.wait(job.id(), always).ok());
      results[rank] = memory;
    });
    for (const Floats& result : results) {
      EXPECT_FALSE(std::isfinite(result[77]));
      EXPECT_TRUE(same_bits(result, results[0]));
    }
    EXPECT_TRUE(same_bits(floats_of(job.client(1).residual(job.id())), before));
  }
  for (std::size_t rank = 0; rank < 3; ++rank) job.residuals()[rank] = floats_of(job.client(rank).residual(job.id()));
  job.expect_step({random_floats(random, size), random_floats(random, size), random_floats(random, size)}, 3);
}

TEST(TopK, TheBytesAreThoseOfTheClosedForm) {
  const std::size_t size = 200'000;
  const std::size_t workers = 4;
  LossyJob job(workers, topk_layer(size), slow_topk(2000));
  const Cluster cluster{workers, workers, Placement::colocated};
  job.expect_step({Floats(size, 1), Floats(size, 2), Floats(size, 3), Floats(size, 4)}, 4);
  for (std::size_t rank = 0; rank < workers; ++rank) {
    const LayerStats stats = job.client(rank).layer_stats(job.id());
    const double cost = layer_cost(topk_layer(size), Scheme::topk, 0, cluster).busiest(cluster) * sizeof(float);
    EXPECT_EQ(cost, 2 * 3 * 2000 * 8.0);
    EXPECT_NEAR(static_cast<double>(stats.bytes_sent + stats.bytes_received), cost, 0.01 * cost);
    const double dense = layer_cost(topk_layer(size), Scheme::ps, 0, cluster).busiest(cluster) * sizeof(float);
    EXPECT_LT(cost, 0.05 * dense);
  }
}

TEST(TopK, TheResidualCanBeTakenAlong) {
  const std::size_t size = 300;
  std::mt19937 random(9);
  LossyJob first(2, topk_layer(size), slow_topk(3));
  EXPECT_TRUE(first.client(0).residual(first.id()).empty());
  EXPECT_TRUE(first.client(0).residual(99).empty());
  first.expect_step({random_floats(random, size), random_floats(random, size)}, 2);
  LossyJob second(2, topk_layer(size), slow_topk(3));
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(second.client(rank).set_residual(second.id(), first.client(rank).residual(first.id())).ok());
    second.residuals()[rank] = first.residuals()[rank];
  }
  second.expect_step({random_floats(random, size), random_floats(random, size)}, 2);
  ASSERT_TRUE(second.client(0).set_residual(second.id(), {}).ok());
  EXPECT_TRUE(second.client(0).residual(second.id()).empty());
  Floats short_one(size - 1);
  const Status status = second.client(0).set_residual(second.id(), bytes_of(short_one));
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(status, "1200 bytes")) << status.message();
  EXPECT_EQ(second.client(0).set_residual(99, {}).code(), ErrorCode::invalid_argument);
}

TEST(TopK, ARankMayLeaveWhileItCompresses) {
  const std::size_t size = 4'000'000;
  LossyJob job(2, topk_layer(size), slow_topk(40'000));
  job.cluster().each([&](std::size_t rank, Client& client) {
    Floats memory(size, static_cast<float>(rank + 1));
    ASSERT_TRUE(client.start(job.id(), bytes_of(memory), 1).ok());
    if (rank == 0) return client.shutdown();
    const Status status = client.wait(job.id(), always);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(memory[39'999], 3.0F);
    EXPECT_EQ(memory[40'000], 0.0F);
  });
}

TEST(TopKPlan, RefusesWhatItCannotCompress) {
  const Cluster cluster{4, 4, Placement::colocated};
  const auto refusal = [&](const Layer& layer, const Options& options = {}) {
    const auto plan = make_plan({layer}, cluster, options, 0);
    EXPECT_FALSE(plan.ok());
    return plan.status();
  };
  for (const DType dtype : {DType::float64, DType::bfloat16, DType::int32}) {
    Layer layer = topk_layer(100'000);
    layer.dtype = dtype;
    EXPECT_TRUE(contains(refusal(layer), "takes float32 gradients"));
  }
  for (const double fraction : {0.0, -0.5, 1.5, double{kNan}})
    EXPECT_TRUE(contains(refusal(topk_layer(100'000, fraction)), "topk_fraction"));
  Layer wire = topk_layer(100'000);
  wire.wire = WireFormat::bf16;
  EXPECT_TRUE(contains(refusal(wire), "sends numbers as they are"));
  Layer rows = matrix_layer("table", 1000, 100, Scheme::topk);
  rows.row_gradient = true;
  EXPECT_TRUE(contains(refusal(rows), "dense gradients"));
  Layer allowed = matrix_layer("allowed", 1000, 100);
  allowed.compression.allowed = Scheme::sfb;
  EXPECT_TRUE(contains(refusal(allowed), "not lossy"));
  Options drop;
  drop.stragglers = Stragglers::drop;
  EXPECT_TRUE(contains(refusal(topk_layer(100'000), drop), "late workers"));
}

TEST(TopKPlan, SmallAndStoredLayersStayExact) {
  const Cluster cluster{4, 4, Placement::colocated};
  Layer stored = topk_layer(100'000);
  stored.name = "stored";
  stored.stored = true;
  Layer bias = topk_layer(10);
  bias.name = "bias";
  const auto plan = make_plan({topk_layer(100'000), bias, stored}, cluster, {}, 0);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan.value().layers[0].scheme, Scheme::topk);
  EXPECT_EQ(plan.value().layers[1].scheme, Scheme::ps);
  EXPECT_EQ(plan.value().layers[2].scheme, Scheme::ps);
  const auto alone = make_plan({topk_layer(100'000)}, {1, 1, Placement::colocated}, {}, 0);
  EXPECT_EQ(alone.value().layers[0].scheme, Scheme::local);
}

TEST(TopKPlan, AutoTakesItOnlyWhereItIsAllowedAndCheaper) {
  const Cluster cluster{4, 4, Placement::colocated};
  Layer layer = matrix_layer("layer", 1000, 1000);
  EXPECT_EQ(best_scheme(layer, 0, cluster), Scheme::ps);
  EXPECT_EQ(best_scheme(layer, 4, cluster), Scheme::sfb);
  layer.compression.allowed = Scheme::topk;
  EXPECT_EQ(best_scheme(layer, 0, cluster), Scheme::topk);
  EXPECT_EQ(best_scheme(layer, 4, cluster), Scheme::sfb) << "8000 numbers of factors are fewer than 20000";
  EXPECT_EQ(best_scheme(layer, 40, cluster), Scheme::topk);
  EXPECT_EQ(best_scheme(layer, 0, {200, 200, Placement::colocated}), Scheme::ps) << "every worker gets all parts";
  layer.wire = WireFormat::bf16;
  EXPECT_EQ(best_scheme(layer, 0, cluster), Scheme::ps);
  Layer convolution = vector_layer("convolution", 100'000);
  convolution.compression.allowed = Scheme::topk;
  EXPECT_EQ(best_scheme(convolution, 0, cluster), Scheme::topk);
  convolution.dtype = DType::bfloat16;
  EXPECT_EQ(best_scheme(convolution, 0, cluster), Scheme::ps);
  EXPECT_EQ(best_scheme(vector_layer("empty", 0), 0, cluster), Scheme::ps);
}

TEST(TopKPlan, RanksThatDisagreeAreToldAtOnce) {
  TestCluster cluster(LossyJob::over_tcp(2));
  cluster.each([&](std::size_t rank, Client& client) {
    const auto added = client.add_layers({topk_layer(1000, rank == 0 ? 0.01 : 0.02)}, false, always);
    EXPECT_EQ(added.status().code(), ErrorCode::mismatch);
    EXPECT_TRUE(contains(added.status(), "differs")) << added.status().message();
  });
}

/// What a peer may send, without a network.
class TopKFromPeer : public ::testing::Test {
 protected:
  TopKFromPeer() {
    unit_.name = "layer";
    unit_.size_bytes = layer_.size_bytes();
    exchange_.about.unit = &unit_;
    exchange_.about.layer = &layer_;
    links_.worker_count = 3;
    links_.pool = std::make_shared<BufferPool>();
  }

  static wire::Contribution elements(std::uint64_t count) {
    wire::Contribution message;
    message.kind = wire::Kind::topk;
    message.rank = 1;
    message.payload_bytes = count * 8;
    return message;
  }
  Status accept(const wire::Contribution& message) {
    return peer_broadcast_of(message.kind).make_room(inbox_, exchange_, message.make(), links_).status();
  }

  Layer layer_ = topk_layer(200);  // two elements
  Unit unit_;
  Exchange exchange_;
  PeerInbox inbox_;
  Links links_;
};

TEST_F(TopKFromPeer, IsRefusedIfTheHeaderDoesNotFit) {
  EXPECT_TRUE(contains(accept(elements(3)), "size"));
  EXPECT_TRUE(contains(accept(elements(0)), "size"));
  wire::Contribution wrong = elements(2);
  wrong.dtype = DType::float64;
  EXPECT_TRUE(contains(accept(wrong), "dtype"));
  wrong = elements(2);
  wrong.rows = 4;
  EXPECT_TRUE(contains(accept(wrong), "shape"));
  EXPECT_TRUE(accept(elements(2)).ok());
  EXPECT_TRUE(contains(accept(elements(2)), "twice"));
  wrong = elements(0);
  wrong.kind = wire::Kind::factors;
  wrong.rank = 2;
  EXPECT_TRUE(contains(accept(wrong), "another rank's topk")) << "ranks that disagree";
}

TEST_F(TopKFromPeer, IsRefusedBeforeUseIfAnIndexDoesNotFit) {
  const wire::Contribution message = elements(2);
  ASSERT_TRUE(accept(message).ok());
  const std::vector<std::uint32_t> payload{5, 200, 0, 0};
  const Status status = peer_broadcast_of(wire::Kind::topk)
                            .store(inbox_, exchange_, message.make(), std::as_bytes(std::span(payload)), links_);
  EXPECT_EQ(status.code(), ErrorCode::mismatch);
  EXPECT_TRUE(contains(status, "no element 200")) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
