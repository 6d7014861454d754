// local: one worker, whose gradients cross no network.
#include <gtest/gtest.h>

#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/plan.h"

namespace poseidon::testing {
namespace {

using Floats = std::vector<float>;

TEST(Local, OneWorkerGetsItsOwnGradientBackAndSendsNothing) {
  TestCluster cluster(cluster_options(1));
  ASSERT_TRUE(cluster.connected());
  Client& client = *cluster.clients[0];
  constexpr std::size_t count = 200'000;  // several chunks
  const std::uint32_t layer = cluster.add({vector_layer("weight", count)});
  EXPECT_EQ(client.next_scheme(layer), Scheme::local);
  const TrafficStats before = client.traffic();
  for (const std::uint32_t divisor : {1u, 4u}) {
    Floats values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = 1 / static_cast<float>(i + 1);
    Floats expected = values;
    for (float& value : expected) value /= static_cast<float>(divisor);
    ASSERT_TRUE(client.start(layer, bytes_of(values), divisor).ok());
    ASSERT_TRUE(client.wait(layer, always).ok());
    EXPECT_EQ(values, expected);
  }
  const LayerStats stats = client.layer_stats(layer);
  EXPECT_EQ(stats.scheme, Scheme::local);
  EXPECT_EQ(stats.bytes_sent + stats.bytes_received, 0u);
  EXPECT_EQ(client.traffic().bytes_sent, before.bytes_sent);
  EXPECT_EQ(client.traffic().bytes_received, before.bytes_received);
}

TEST(Local, ItCostsNothing) {
  const SchemeCost cost = traits_of(Scheme::local).cost(4096, 4096, 32, {1, 1, Placement::colocated});
  EXPECT_EQ(cost.worker, 0);
  EXPECT_EQ(cost.server, 0);
  EXPECT_EQ(cost.server_and_worker, 0);
}

TEST(Local, ItTakesNoFactors) {
  auto options = cluster_options(1);
  options[0].small_bytes = 0;  // the matrix is no member of a group
  TestCluster cluster(options);
  ASSERT_TRUE(cluster.connected());
  const std::uint32_t layer = cluster.add({matrix_layer("weight", 4, 6)});
  const Floats left(4);
  const Floats right(6);
  Floats memory(24);
  const Status status = cluster.clients[0]->start_factors(
      layer, DType::float32, {{std::as_bytes(std::span(left)).data(), std::as_bytes(std::span(right)).data(), 1}},
      bytes_of(memory), 1, false);
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(status, "takes scheme local")) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
