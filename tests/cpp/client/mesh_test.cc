// Jobs of more workers than are all connected to each other: who is connected when, that all of it works, and that a
// failure reaches everybody.
#include "plan/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "cpp/transport/own_sockets.h"
#include "simulation/sanitized.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kRanks = kFullMesh + 2;

std::vector<Options> many_ranks() {
  auto all = cluster_options(static_cast<int>(kRanks), std::chrono::seconds(60));
  for (Options& options : all) {
    options.transport = Medium::tcp;
    options.priority_classes = 1;
    options.dscp = {0};
  }
  return all;
}

/// The number of calls of neighbours until all ranks know what rank 0 knows.
std::size_t hops(std::size_t worker_count) {
  std::vector<bool> knows(worker_count, false);
  knows[0] = true;
  for (std::size_t hops = 0;; ++hops) {
    if (std::ranges::find(knows, false) == knows.end()) return hops;
    const auto before = knows;
    for (std::size_t rank = 0; rank < worker_count; ++rank)
      for (std::size_t other = 0; other < worker_count; ++other)
        if (before[other] && are_neighbours(rank, other, worker_count)) knows[rank] = true;
    if (before == knows) return worker_count;
  }
}

TEST(Mesh, SmallJobsAreWholeAndLargeOnesHaveShortWays) {
  EXPECT_EQ(neighbour_count(1), 0U);
  EXPECT_EQ(neighbour_count(kFullMesh), kFullMesh - 1);
  EXPECT_EQ(hops(kFullMesh), 1U);
  for (const std::size_t count : {65U, 100U, 128U, 255U}) {
    EXPECT_LE(neighbour_count(count), 16U) << count;
    EXPECT_LE(hops(count), 7U) << count;
    for (std::size_t rank = 0; rank < count; ++rank)
      for (std::size_t other = 0; other < count; ++other)
        EXPECT_EQ(are_neighbours(rank, other, count), are_neighbours(other, rank, count));
  }
  EXPECT_LE(neighbour_count(1024), 20U);
}

/// One rank's contribution to a 4 × 3 matrix of equal elements, and the sum of all.
struct Factors {
  explicit Factors(float value) : left(4, value) {}
  Status start(Client& client, std::uint32_t layer) {
    return client.start_factors(layer, DType::float32, {{bytes_of(left).data(), bytes_of(right).data(), 1}},
                                bytes_of(sum), 1, false);
  }
  void expect_sum(Client& client, std::uint32_t layer, std::size_t expected) const {
    const Status status = client.wait(layer, always);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(sum, std::vector<float>(12, static_cast<float>(expected)));
  }

  std::vector<float> left;
  std::vector<float> right = std::vector<float>(3, 1.0F);
  std::vector<float> sum = std::vector<float>(12);
};

void exchange_factors(TestCluster& cluster, std::uint32_t layer) {
  cluster.each([layer](std::size_t rank, Client& client) {
    Factors factors(static_cast<float>(rank));
    const Status started = factors.start(client, layer);
    EXPECT_TRUE(started.ok()) << started.message();
    factors.expect_sum(client, layer, kRanks * (kRanks - 1) / 2);
  });
}

void exchange_dense(TestCluster& cluster, std::uint32_t layer) {
  cluster.each([layer](std::size_t, Client& client) {
    std::vector<float> ones(1000, 1.0F);
    EXPECT_TRUE(client.start(layer, bytes_of(ones), 1).ok());
    const Status status = client.wait(layer, always);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(ones, std::vector<float>(1000, static_cast<float>(kRanks)));
  });
}

// Both ends of each connection are sockets of this process.
TEST(Mesh, PeersAndServersAreConnectedWhenAStepNeedsThem) {
  TestCluster cluster(many_ranks());
  ASSERT_TRUE(cluster.connected());
  const std::size_t neighbours = kRanks * neighbour_count(kRanks);
  const std::size_t servers = 2 * (kRanks - 1);  // of all ranks to one server
  const std::size_t linked = own_sockets().size();
  EXPECT_GE(linked, neighbours + servers);  // where plans are compared
  EXPECT_LT(linked, neighbours + 3 * servers);
  const auto first = cluster.add({vector_layer("dense", 1000), matrix_layer("factors", 4, 3, Scheme::sfb)});
  exchange_dense(cluster, first);
  EXPECT_LT(own_sockets().size(), neighbours + 4 * servers);
  exchange_factors(cluster, first + 1);
  exchange_factors(cluster, first + 1);
  exchange_dense(cluster, first);
  EXPECT_GE(own_sockets().size(), kRanks * (kRanks - 1));
  EXPECT_LT(own_sockets().size(), kRanks * (kRanks - 1) + 4 * servers);
  // One process does both ends of 8,580 handshakes at once. A sanitizer takes longer for them than a server waits.
  if (kSanitized) return;
  cluster.add({vector_layer("of all servers", kRanks * kRanks * 1000)});
  EXPECT_GE(own_sockets().size(), kRanks * (kRanks - 1) + kRanks * servers);
}

// Its part waits for connections when it leaves. The others have a right to it.
TEST(Mesh, ARankThatLeavesHasContributedWhatItStarted) {
  TestCluster cluster(many_ranks());
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("factors", 4, 3, Scheme::sfb)});
  cluster.each([&](std::size_t rank, Client& client) {
    Factors factors(1.0F);
    const Status started = factors.start(client, first);
    EXPECT_TRUE(started.ok()) << started.message();
    if (rank == kRanks - 1) return client.shutdown();
    factors.expect_sum(client, first, kRanks);
  });
}

TEST(Mesh, ARankThatLeavesEndsWhatWaitsForIt) {
  TestCluster cluster(many_ranks());
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("factors", 4, 3, Scheme::sfb)});
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == kRanks - 1) return client.shutdown();
    Factors factors(1.0F);
    static_cast<void>(factors.start(client, first));
    EXPECT_EQ(client.wait(first, always).code(), ErrorCode::peer_lost);
  });
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(30)) << "the timeout is 60 s";
}

TEST(Mesh, AFailureReachesEverybody) {
  TestCluster cluster(many_ranks());
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({vector_layer("dense", 1000), matrix_layer("factors", 4, 3, Scheme::sfb)});
  const std::size_t failed = 7;
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == failed) return client.abort("on purpose", false);
    std::vector<float> ones(1000, 1.0F);
    Factors factors(1.0F);
    // One rank waits for peers that will never be connected.
    if (rank == 0) static_cast<void>(factors.start(client, first + 1));
    static_cast<void>(client.start(first, bytes_of(ones), 1));
    const Status status = client.wait_all(always);
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(contains(status, "rank " + std::to_string(failed))) << status.message();
  });
}

}  // namespace
}  // namespace poseidon::testing
