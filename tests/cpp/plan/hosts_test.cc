// Which workers share a machine, and which of them leads a chunk there.
#include "plan/hosts.h"

#include <gtest/gtest.h>

#include <set>

namespace poseidon {
namespace {

using Numbers = std::vector<std::uint32_t>;

Cluster cluster_on(Numbers hosts, Placement placement = Placement::colocated) {
  Cluster cluster;
  cluster.worker_count = static_cast<int>(hosts.size());
  cluster.server_count = placement == Placement::colocated ? cluster.worker_count : 2;
  cluster.placement = placement;
  cluster.hosts = std::move(hosts);
  return cluster;
}

TEST(Hosts, AreNumberedInTheOrderOfTheRanks) { EXPECT_EQ(number_hosts({"b", "a", "b", "c"}), (Numbers{0, 1, 0, 2})); }

TEST(Hosts, DoNotMatterIfAllWorkersShareOneOrNoneShareAny) {
  EXPECT_EQ(number_hosts({"a", "a", "a"}), Numbers());
  EXPECT_EQ(number_hosts({"a", "b", "c"}), Numbers());
  EXPECT_EQ(number_hosts({}), Numbers());
  EXPECT_FALSE(Hosts().together());
}

TEST(Hosts, ListTheirRanks) {
  const Hosts hosts(cluster_on({0, 1, 0, 2, 0}));
  ASSERT_TRUE(hosts.together());
  EXPECT_EQ(hosts.count(), 3u);
  EXPECT_EQ(hosts.ranks_of(0), (Numbers{0, 2, 4}));
  EXPECT_EQ(hosts.place_of(4), 2u);
  EXPECT_FALSE(hosts.even());
  EXPECT_TRUE(Hosts(cluster_on({0, 1, 1, 0})).even());
}

TEST(Hosts, LeadTheirOwnServersChunks) {
  const Hosts hosts(cluster_on({0, 0, 1, 1, 1}));
  for (int server = 0; server < 5; ++server) {
    const auto rank = static_cast<std::uint32_t>(server);
    EXPECT_EQ(hosts.leader(hosts.host_of(rank), Unit(), Chunk{.server = server}), rank);
  }
  EXPECT_EQ(hosts.leader(0, Unit(), Chunk{.server = 4}), 0u) << "place 2 of a machine of two";
}

TEST(Hosts, LeadChunksOfDedicatedServersInTurn) {
  const Hosts hosts(cluster_on({0, 0, 1, 1}, Placement::dedicated));
  std::set<std::uint32_t> leaders;
  for (std::uint32_t index = 0; index < 4; ++index) leaders.insert(hosts.leader(1, Unit(), Chunk{.index = index}));
  EXPECT_EQ(leaders, (std::set<std::uint32_t>{2, 3}));
}

TEST(Hosts, HaveOneGateForEachRankElsewhere) {
  const Hosts hosts(cluster_on({0, 0, 0, 1, 1}));
  EXPECT_EQ(hosts.gate(1, 0), 3u);
  EXPECT_EQ(hosts.gate(1, 1), 4u);
  EXPECT_EQ(hosts.gate(1, 2), 3u);
  EXPECT_EQ(hosts.gate(0, 4), 1u);
}

}  // namespace
}  // namespace poseidon
