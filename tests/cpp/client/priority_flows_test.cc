// The connections of the priority classes: their packets, and their ends.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "cpp/transport/own_sockets.h"
#include "server/server_impl.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

std::vector<Options> tcp_options(int world_size, int priority_classes, std::vector<int> dscp) {
  auto all = cluster_options(world_size);
  for (Options& options : all) {
    options.transport = Medium::tcp;
    options.coding = CodingPolicy::off;  // the bytes of a class are counted
    options.priority_classes = priority_classes;
    options.dscp = dscp;
  }
  return all;
}

std::map<int, std::size_t> sockets_by_dscp() {
  std::map<int, std::size_t> counts;
  for (const OwnSocket& socket : own_sockets()) ++counts[socket.dscp];
  return counts;
}

/// The bytes that all connections between ranks of this process have sent, by mark.
std::map<int, double> megabytes_by_dscp() {
  std::map<int, double> sums;
  for (const OwnSocket& socket : own_sockets()) sums[socket.dscp] += static_cast<double>(socket.bytes_sent) / 1e6;
  return sums;
}

TEST(PriorityFlows, BothEndsOfEachAreMarked) {
  TestCluster cluster(tcp_options(2, 3, {46, 34, 0}));
  ASSERT_TRUE(cluster.connected());
  // Each rank has one connection of each class to the other's server, and one of each is between the ranks.
  auto counts = sockets_by_dscp();
  EXPECT_EQ(counts[46], 6u);
  EXPECT_EQ(counts[34], 6u);
  EXPECT_GE(counts[0], 6u) << "others are not marked, such as those to the store";
  std::map<int, int> priorities;
  for (const OwnSocket& socket : own_sockets())
    if (socket.dscp != 0) priorities[socket.dscp] = socket.priority;
  EXPECT_EQ(priorities, (std::map<int, int>{{46, 6}, {34, 4}}));
  EXPECT_TRUE(cluster.clients[0]->notices().empty());
}

TEST(PriorityFlows, AnOptionsMarkOfZeroMarksNothing) {
  TestCluster cluster(tcp_options(2, 2, {0, 0}));
  ASSERT_TRUE(cluster.connected());
  EXPECT_EQ(sockets_by_dscp().size(), 1u);
}

TEST(PriorityFlows, WhatCannotBeMarkedIsToldOnceAndTheJobGoesOn) {
  const auto transport = make_tcp_transport();
  Options any_job;
  any_job.world_size = 0;
  ServerImpl server(any_job);
  ASSERT_TRUE(server.listen(*transport, "[::1]:0").ok());
  auto all = tcp_options(2, 2, {64, 65});  // are no code points: IPv6 refuses them
  for (Options& options : all) options.servers = {server.address()};
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  for (const auto& client : cluster.clients) {
    const auto notices = client->notices();
    ASSERT_EQ(notices.size(), 1u);
    EXPECT_NE(notices[0].find("DSCP 64"), std::string::npos) << notices[0];
    EXPECT_NE(notices[0].find("goes on"), std::string::npos) << notices[0];
  }
  const auto layer = cluster.add({vector_layer("a", 5000)});
  cluster.each([&](std::size_t, Client& client) {
    std::vector<float> gradient(5000, 1.0F);
    EXPECT_TRUE(client.set_priorities(layer, std::vector<LayerPriority>{{1, 0}}, 0.5).ok());
    EXPECT_TRUE(client.start(layer, bytes_of(gradient), 1).ok());
    EXPECT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(gradient, std::vector<float>(5000, 2.0F));
  });
}

class BytesOfAClass : public ::testing::TestWithParam<Scheme> {};

/// Exchanges a matrix whose class changes. All of its bytes use the connections of its class.
TEST_P(BytesOfAClass, TakeItsConnections) {
  constexpr std::size_t kRows = 400;
  constexpr std::size_t kCols = 600;
  constexpr std::size_t kFactors = 500;
  TestCluster cluster(tcp_options(2, 2, {46, 10}));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({matrix_layer("matrix", kRows, kCols, GetParam())});
  const double payload = GetParam() == Scheme::ps ? kRows * kCols : kFactors * (kRows + kCols);
  // ps: each half of the matrix goes to the other rank's server and its sum comes back; sfb: factors to the other rank.
  const double expected = payload * sizeof(float) * 2 / 1e6;
  for (const int priority_class : {0, 1, 0}) {
    auto before = megabytes_by_dscp();
    cluster.each([&](std::size_t, Client& client) {
      EXPECT_TRUE(client.set_priorities(layer, std::vector<LayerPriority>{{0.5, priority_class}}, 0).ok());
      std::vector<float> matrix(kRows * kCols, 1.0F);
      std::vector<float> left(kFactors * kRows, 1.0F);
      std::vector<float> right(kFactors * kCols, 1.0F);
      const FactorRows rows{bytes_of(left).data(), bytes_of(right).data(), kFactors};
      const Status started = GetParam() == Scheme::ps
                                 ? client.start(layer, bytes_of(matrix), 1)
                                 : client.start_factors(layer, DType::float32, {rows}, bytes_of(matrix), 1, false);
      EXPECT_TRUE(started.ok()) << started.message();
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_EQ(matrix[1], GetParam() == Scheme::ps ? 2.0F : 2.0F * kFactors);
    });
    auto after = megabytes_by_dscp();
    const int mark = priority_class == 0 ? 46 : 10;
    const int other = priority_class == 0 ? 10 : 46;
    EXPECT_NEAR(after[mark] - before[mark], expected, 0.01 * expected);
    EXPECT_LT(after[other] - before[other], 0.01 * expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, BytesOfAClass, ::testing::Values(Scheme::ps, Scheme::sfb),
                         [](const auto& tested) { return std::string(scheme_name(tested.param)); });

class LeavingRank : public ::testing::TestWithParam<Scheme> {};

/// A rank that has finished shuts down. Its goodbye on an idle class must not end the messages that are still on their
/// way on another class.
TEST_P(LeavingRank, LetsTheOthersFinishTheirLastStep) {
  constexpr std::size_t kSize = 64;
  constexpr std::size_t kFactors = 60'000;  // 31 MB of them, from the one that leaves
  constexpr std::size_t kElements = 8u << 20;
  for (int round = 0; round < 3; ++round) {
    auto all = tcp_options(2, 2, {46, 0});
    for (Options& options : all) options.partition = Partition::coarse;  // rank 0's server has all of it
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    const bool ps = GetParam() == Scheme::ps;
    const auto layer =
        cluster.add({ps ? vector_layer("large", kElements) : matrix_layer("large", kSize, kSize, Scheme::sfb)});
    cluster.each([&](std::size_t rank, Client& client) {
      std::vector<float> gradient(ps ? kElements : 0, 1.0F);
      std::vector<float> rows(ps ? 0 : kFactors * kSize, 1.0F);
      const std::size_t count = rank == 0 ? kFactors : 1;
      const FactorRows factors{bytes_of(rows).data(), bytes_of(rows).data(), count};
      const Status started = ps ? client.start(layer, bytes_of(gradient), 1)
                                : client.start_factors(layer, DType::float32, {factors}, {}, 1, false);
      EXPECT_TRUE(started.ok()) << started.message();
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << "rank " << rank << ": " << status.message();
      if (ps && status.ok()) EXPECT_EQ(gradient, std::vector<float>(kElements, 2.0F));
      if (rank == 0) client.shutdown();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, LeavingRank, ::testing::Values(Scheme::ps, Scheme::sfb),
                         [](const auto& tested) { return std::string(scheme_name(tested.param)); });

class AbortOvertakes : public ::testing::TestWithParam<int> {};

/// The reason of a failure does not wait behind the data of a step that is lost anyway.
TEST_P(AbortOvertakes, WhatIsQueued) {
  constexpr std::size_t kSize = 64;
  constexpr std::size_t kFactors = 8192;  // 4 MiB in all
  constexpr std::uint32_t kLayers = 64;
  TestCluster cluster(tcp_options(2, GetParam(), {0}));
  ASSERT_TRUE(cluster.connected());
  std::vector<Layer> layers;
  for (std::uint32_t i = 0; i < kLayers; ++i)
    layers.push_back(matrix_layer(std::to_string(i), kSize, kSize, Scheme::sfb));
  const auto first = cluster.add(layers);
  std::vector<float> rows(kFactors * kSize, 1.0F);
  const auto start_all = [&](Client& client, std::size_t count) {
    for (std::uint32_t i = 0; i < kLayers; ++i) {
      const FactorRows factors{bytes_of(rows).data(), bytes_of(rows).data(), count};
      ASSERT_TRUE(client.start_factors(first + i, DType::float32, {factors}, {}, 1, false).ok());
    }
  };
  start_all(*cluster.clients[0], 1);
  const auto begun = Clock::now();
  start_all(*cluster.clients[1], kFactors);
  cluster.clients[1]->abort("the loss is not a number");
  const Status status = cluster.clients[0]->wait_all(always);
  EXPECT_LT(Clock::now() - begun, milliseconds(1500));
  EXPECT_EQ(status.code(), ErrorCode::aborted);
  EXPECT_TRUE(contains(status, "ended the job: the loss is not a number")) << status.message();
  std::size_t arrived = 0;
  for (std::uint32_t i = 0; i < kLayers; ++i) arrived += cluster.clients[0]->layer_stats(first + i).present ? 1 : 0;
  EXPECT_LT(arrived, kLayers / 2) << "the reason came after the data";
  EXPECT_FALSE(cluster.clients[1]->wait_all(always).ok());  // `rows` is free again
}

INSTANTIATE_TEST_SUITE_P(Classes, AbortOvertakes, ::testing::Values(1, 2));

TEST(UcxPriorities, EachClassHasATransportOfItsOwn) {
  if (!ucx_available()) GTEST_SKIP() << "this build has no UCX";
  auto all = tcp_options(2, 3, {46, 34, 0});
  for (Options& options : all) options.transport = Medium::ucx;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({vector_layer("a", 300'000), vector_layer("b", 300'000), vector_layer("c", 300'000),
                                  matrix_layer("d", 100, 100, Scheme::sfb)});
  for (const int shift : {0, 1, 2}) {
    cluster.each([&](std::size_t, Client& client) {
      std::vector<LayerPriority> priorities;
      for (int i = 0; i < 4; ++i) priorities.push_back({1 - 0.25 * i, (i + shift) % 3});
      EXPECT_TRUE(client.set_priorities(first, priorities, 0.5).ok());
      std::vector<std::vector<float>> gradients(3, std::vector<float>(300'000, 1.0F));
      std::vector<float> matrix(10'000, 1.0F);
      for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(client.start(first + i, bytes_of(gradients[i]), 1).ok());
      EXPECT_TRUE(client.start(first + 3, bytes_of(matrix), 1).ok());
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << status.message();
      for (const auto& gradient : gradients) EXPECT_EQ(gradient, std::vector<float>(300'000, 2.0F));
      EXPECT_EQ(matrix, std::vector<float>(10'000, 2.0F));
    });
  }
}

}  // namespace
}  // namespace poseidon::testing
