// Which workers share a machine, and which of them leads a chunk there.
#include "plan/hosts.h"

#include <gtest/gtest.h>

#include <set>

namespace poseidon {
namespace {

using Numbers = std::vector<std::uint32_t>;

Cluster cluster_on(Numbers hosts, Placement placement = Placement::colocated, Numbers racks = {}) {
  Cluster cluster;
  cluster.worker_count = static_cast<int>(hosts.size());
  cluster.server_count = placement == Placement::colocated ? cluster.worker_count : 2;
  cluster.placement = placement;
  cluster.hosts = std::move(hosts);
  cluster.racks = std::move(racks);
  return cluster;
}

using Names = std::vector<std::string>;

TEST(Hosts, AreNumberedInTheOrderOfTheRanks) {
  EXPECT_EQ(number_hosts({"b", "a", "b", "c"}, Names(4)).hosts, (Numbers{0, 1, 0, 2}));
  EXPECT_EQ(number_hosts({"b", "a", "b", "c"}, Names(4)).racks, Numbers());
}

TEST(Hosts, DoNotMatterIfAllWorkersShareOneOrNoneShareAny) {
  EXPECT_EQ(number_hosts({"a", "a", "a"}, Names(3)).hosts, Numbers());
  EXPECT_EQ(number_hosts({"a", "b", "c"}, Names(3)).hosts, Numbers());
  EXPECT_EQ(number_hosts({}, {}).hosts, Numbers());
  EXPECT_FALSE(Hosts().together());
}

TEST(Racks, AreThoseThatHaveSeveralMachines) {
  const auto racks_of = [](const Names& machines, const Names& racks) { return number_hosts(machines, racks).racks; };
  EXPECT_EQ(racks_of({"a", "b", "c"}, {"y", "x", "y"}), (Numbers{0, 1, 0})) << "of one worker each";
  EXPECT_EQ(racks_of({"a", "a", "b", "c"}, {"x", "x", "x", "y"}), (Numbers{0, 0, 0, 1}));
  EXPECT_EQ(racks_of({"a", "a", "b"}, {"x", "x", "y"}), Numbers()) << "each rack is a machine";
  EXPECT_EQ(racks_of({"a", "b"}, {"x", "x"}), Numbers()) << "all are in one rack";
  EXPECT_EQ(number_hosts({"a", "b"}, {"x", "x"}).hosts, Numbers());
  EXPECT_EQ(number_hosts({"a", "b", "c"}, {"x", "x", "y"}).hosts, (Numbers{0, 1, 2})) << "machines of one worker";
}

/// Who pushes what `rank` gives.
std::uint32_t pusher(const Hosts& hosts, std::uint32_t rank, const Chunk& chunk) {
  while (const auto next = hosts.next(rank, Unit(), chunk)) rank = *next;
  return rank;
}

TEST(Hosts, ListTheirRanks) {
  const Hosts hosts(cluster_on({0, 1, 0, 2, 0}));
  ASSERT_TRUE(hosts.together());
  EXPECT_EQ(hosts.rack_count(), 3u);
  EXPECT_EQ(hosts.mates_of(2), (Numbers{0, 2, 4}));
  EXPECT_EQ(hosts.part_of(0, 4), 2u);
  EXPECT_FALSE(hosts.even());
  EXPECT_TRUE(Hosts(cluster_on({0, 1, 1, 0})).even());
  EXPECT_FALSE(Hosts(cluster_on({0, 1, 2}, Placement::colocated, {0, 0, 1})).even());
}

TEST(Hosts, LeadTheirOwnServersChunks) {
  const Hosts hosts(cluster_on({0, 0, 1, 1, 1}));
  for (int server = 0; server < 5; ++server) {
    const auto rank = static_cast<std::uint32_t>(server);
    EXPECT_EQ(hosts.next(rank, Unit(), Chunk{.server = server}), std::nullopt);
  }
  EXPECT_EQ(hosts.next(1, Unit(), Chunk{.server = 4}), 0u) << "place 2 of a machine of two";
}

TEST(Hosts, LeadChunksOfDedicatedServersInTurn) {
  const Hosts hosts(cluster_on({0, 0, 1, 1}, Placement::dedicated));
  std::set<std::uint32_t> leaders;
  for (std::uint32_t index = 0; index < 4; ++index) leaders.insert(pusher(hosts, 2, Chunk{.index = index}));
  EXPECT_EQ(leaders, (std::set<std::uint32_t>{2, 3}));
}

TEST(Hosts, HaveOneGateForEachRankElsewhere) {
  const Hosts hosts(cluster_on({0, 0, 0, 1, 1}));
  EXPECT_EQ(hosts.source_of(3, 0), 0u) << "it is the gate itself";
  EXPECT_EQ(hosts.source_of(4, 0), 3u);
  EXPECT_EQ(hosts.source_of(3, 1), 4u);
  EXPECT_EQ(hosts.source_of(4, 2), 3u);
  EXPECT_EQ(hosts.source_of(1, 4), 4u);
  EXPECT_EQ(hosts.source_of(2, 4), 1u);
  EXPECT_EQ(hosts.source_of(2, 1), 1u) << "on the same machine";
}

// Two racks: machines 0 and 1 with two workers each, and machines 2 and 3 likewise.
const Numbers kHosts{0, 0, 1, 1, 2, 2, 3, 3};
const Numbers kRacks{0, 0, 0, 0, 1, 1, 1, 1};

TEST(Racks, PushOnceEach) {
  for (const Placement placement : {Placement::colocated, Placement::dedicated}) {
    const Hosts hosts(cluster_on(kHosts, placement, kRacks));
    std::set<std::uint32_t> all;
    for (int chunk = 0; chunk < 8; ++chunk) {
      const Chunk at{.index = static_cast<std::uint32_t>(chunk),
                     .server = placement == Placement::colocated ? chunk : 0};
      std::set<std::uint32_t> pushers;
      for (std::uint32_t rank = 0; rank < 8; ++rank) {
        pushers.insert(pusher(hosts, rank, at));
        EXPECT_TRUE(hosts.share_rack(rank, pusher(hosts, rank, at)));
      }
      EXPECT_EQ(pushers.size(), 2u) << "one for each rack";
      if (placement == Placement::colocated) EXPECT_TRUE(pushers.contains(static_cast<std::uint32_t>(chunk)));
      all.insert(pushers.begin(), pushers.end());
    }
    EXPECT_EQ(all.size(), 8u) << "all workers push some chunk";
  }
}

TEST(Racks, ReceiveWhatEachSendsToAllOnceFromAboveAndEachRankOnce) {
  const Hosts hosts(cluster_on(kHosts, Placement::colocated, kRacks));
  for (std::uint32_t origin = 0; origin < 8; ++origin) {
    int uplinks = 0;
    int ports = 0;
    for (std::uint32_t rank = 0; rank < 8; ++rank) {
      if (rank == origin) continue;
      const std::uint32_t source = hosts.source_of(rank, origin);
      uplinks += hosts.share_rack(source, rank) ? 0 : 1;
      ports += hosts.crosses(source, rank) ? 1 : 0;
      std::uint32_t from = rank;
      for (int hop = 0; hop < 3 && from != origin; ++hop) from = hosts.source_of(from, origin);
      EXPECT_EQ(from, origin) << "rank " << rank << " is not reached";
    }
    EXPECT_EQ(uplinks, 1);
    EXPECT_EQ(ports, 3) << "once for each other machine";
  }
}

}  // namespace
}  // namespace poseidon
