// The rendezvous of the ranks of a job.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/hosts.h"
#include "rendezvous/members.h"
#include "rendezvous/tcp_store.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::contains;
using testing::free_port;
using testing::open_store;
using testing::run_ranks;
using testing::test_options;

/// The addresses that a rank publishes. Each has another number of cores, and every second one shared memory, too.
Member member_of(int rank) {
  const std::string name = std::to_string(rank);
  Member member{"host" + name, {}, "peer" + name, {}, rank % 2 == 0 ? "" : "peer shm" + name};
  for (int core = 0; core < rank; ++core) {
    member.server_addresses.push_back("server" + name + ":" + std::to_string(core));
    if (rank % 2 != 0) member.server_shm_addresses.push_back("shm" + name + ":" + std::to_string(core));
  }
  return member;
}

/// Returns the result of meet() for each rank. Ranks in `missing` never come.
std::vector<Status> meet_all(std::vector<Options> all, const std::vector<int>& missing = {}) {
  std::vector<Status> outcomes(all.size());
  run_ranks(static_cast<int>(all.size()), [&](int rank) {
    if (std::ranges::find(missing, rank) != missing.end()) return;
    const Options& options = all[static_cast<std::size_t>(rank)];
    const auto store = open_store(options);
    if (!store) return;
    const std::string name = std::to_string(rank);
    const auto members = meet(*store, options, member_of(rank), always);
    outcomes[static_cast<std::size_t>(rank)] = members.status();
    if (!members.ok()) return;
    EXPECT_EQ(members.value().rank, rank);
    ASSERT_EQ(members.value().members.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Member& member = members.value().members[i];
      const Member expected = member_of(static_cast<int>(i));
      EXPECT_EQ(member.host_id, expected.host_id);
      EXPECT_EQ(member.server_addresses, expected.server_addresses);
      EXPECT_EQ(member.peer_address, expected.peer_address);
      EXPECT_EQ(member.server_shm_addresses, expected.server_shm_addresses);
      EXPECT_EQ(member.peer_shm_address, expected.peer_shm_address);
    }
    // Rank 0 serves the store, so it must stay until the others have read it.
    EXPECT_TRUE(store->set("met/" + name, "1").ok());
    for (std::size_t i = 0; rank == 0 && i < all.size(); ++i)
      EXPECT_TRUE(store->get("met/" + std::to_string(i), milliseconds(5000)).ok());
  });
  return outcomes;
}

std::vector<Options> options_of(int world_size) {
  const auto port = free_port();
  std::vector<Options> all;
  for (int rank = 0; rank < world_size; ++rank) all.push_back(test_options(rank, world_size, port));
  return all;
}

TEST(Meet, AllRanksLearnAllAddresses) {
  for (const int world_size : {1, 2, 5})
    for (const Status& status : meet_all(options_of(world_size))) EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Meet, AMissingRankIsNamedOnAllRanksWithinTheTimeout) {
  auto all = options_of(4);
  for (auto& options : all) options.timeout = milliseconds(700);
  const auto begun = Clock::now();
  const auto outcomes = meet_all(all, {2});
  EXPECT_LT(Clock::now() - begun, milliseconds(3500));
  for (const int rank : {0, 1, 3}) {
    const Status& status = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(status.code() == ErrorCode::timeout || status.code() == ErrorCode::aborted);
    EXPECT_TRUE(contains(status, "for rank 2 of 4")) << status.message();
  }
}

TEST(Meet, SeveralMissingRanksAreAllNamed) {
  auto all = options_of(4);
  for (auto& options : all) options.timeout = milliseconds(500);
  const auto outcomes = meet_all(all, {1, 3});
  EXPECT_TRUE(contains(outcomes[0], "rank 1, 3 of 4")) << outcomes[0].message();
}

TEST(Meet, DifferingOptionsAreNamedWithTheirRank) {
  const std::vector<std::pair<std::string, void (*)(Options&)>> changes{
      {"chunk_bytes", [](Options& options) { options.chunk_bytes = 4096; }},
      {"small_bytes", [](Options& options) { options.small_bytes = 1; }},
      {"group_bytes", [](Options& options) { options.group_bytes = 1; }},
      {"partition", [](Options& options) { options.partition = Partition::coarse; }},
      {"schedule", [](Options& options) { options.schedule = Schedule::sequential; }},
      {"servers", [](Options& options) { options.servers = {"10.0.0.1:1"}; }},
      {"flows", [](Options& options) { options.flows = 2; }},
      {"assignment", [](Options& options) { options.assignment = Assignment::worker; }},
  };
  for (const auto& [name, change] : changes) {
    auto all = options_of(3);
    change(all[1]);
    const auto outcomes = meet_all(all);
    for (const Status& status : outcomes) {
      EXPECT_TRUE(status.code() == ErrorCode::mismatch || status.code() == ErrorCode::aborted) << name;
      EXPECT_TRUE(contains(status, "disagree on " + name)) << status.message();
      EXPECT_TRUE(contains(status, "rank 1")) << status.message();
    }
  }
}

TEST(Meet, GivesUpWhenInterrupted) {
  const Options options = test_options(0, 2, free_port());
  const auto store = open_store(options);
  ASSERT_TRUE(store);
  const auto members = meet(*store, options, member_of(0), [] { return false; });
  EXPECT_EQ(members.status().code(), ErrorCode::aborted);
}

TEST(Meet, RanksMayDifferInHowTheirServersWork) {
  auto all = options_of(2);
  all[1].server_cores = 3;
  all[1].transport = Medium::tcp;
  all[1].compute_threads = 2;
  for (const Status& status : meet_all(all)) EXPECT_TRUE(status.ok()) << status.message();
}

TEST(ListenHosts, AreTheInterfacesOrTheOneThatLeadsToTheMaster) {
  Options options = test_options(0, 1, 1);
  EXPECT_EQ(listen_hosts(options).value(), std::vector<std::string>{"127.0.0.1"});
  options.interfaces = {"lo"};
  EXPECT_EQ(listen_hosts(options).value(), std::vector<std::string>{"127.0.0.1"});
  options.interfaces = {"127.0.0.2", "lo", "::1"};
  EXPECT_EQ(listen_hosts(options).value(), (std::vector<std::string>{"127.0.0.2", "127.0.0.1", "::1"}));
}

TEST(ListenHosts, AnInterfaceThatDoesNotExistIsNamed) {
  Options options = test_options(0, 1, 1);
  options.interfaces = {"lo", "eth-none"};
  const auto hosts = listen_hosts(options);
  EXPECT_EQ(hosts.status().code(), ErrorCode::unreachable);
  EXPECT_TRUE(contains(hosts.status(), "eth-none"));
}

TEST(HostId, IsTheSameForTheWholeProcessAndSaysSomething) {
  EXPECT_EQ(host_id(), host_id());
  EXPECT_GT(host_id().size(), 10u);
  EXPECT_EQ(host_id().find('\n'), std::string::npos) << "it travels as a line";
}

}  // namespace
}  // namespace poseidon
