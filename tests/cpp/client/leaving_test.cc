// Ranks that leave, the ranks that stay, and connections that do not identify themselves.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cpp/base/temporary_directory.h"
#include "cpp/client/child_rank.h"
#include "cpp/client/cluster.h"
#include "cpp/rendezvous/memory_store.h"
#include "cpp/server/server_fixture.h"
#include "poseidon/server.h"
#include "rendezvous/published.h"
#include "simulation/virtual_time.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

Status exchange(Client& client, std::uint32_t layer, std::size_t element_count) {
  std::vector<float> gradient(element_count, 1.0F);
  if (Status status = client.start(layer, bytes_of(gradient), 1); !status.ok()) return status;
  return client.wait_all(always);
}

/// Exactly one of several shards holds this layer.
TEST(Goodbye, OfARankEndsAStepThatWaitsForItOnAnothersShard) {
  for (const std::size_t leaver : {0u, 1u, 2u}) {
    TestCluster cluster(cluster_options(3));
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add({vector_layer("weights", 10)});
    cluster.each([&](std::size_t, Client& client) { EXPECT_TRUE(exchange(client, layer, 10).ok()); });
    const auto begun = Clock::now();
    cluster.each([&](std::size_t rank, Client& client) {
      if (rank == leaver) {
        for (const std::size_t other : {0u, 1u, 2u})
          if (other != leaver) await_start(*cluster.clients[other], layer);
        return client.shutdown();
      }
      const Status status = exchange(client, layer, 10);
      EXPECT_EQ(status.code(), ErrorCode::peer_lost);
      EXPECT_TRUE(contains(status, "rank " + std::to_string(leaver))) << status.message();
      EXPECT_TRUE(contains(status, "shut down")) << status.message();
    });
    EXPECT_LT(Clock::now() - begun, milliseconds(2000)) << "rank " << leaver;
  }
}

/// A store whose roster comes late: when the rank that wrote it has left, and otherwise after a while.
class LateRoster final : public Store {
 public:
  LateRoster(std::shared_ptr<Store> store, const Options& options, const std::atomic<bool>& has_left)
      : store_(std::move(store)), roster_(roster_key(options.job)), has_left_(has_left) {}

  Status set(const std::string& key, const std::string& value) override { return store_->set(key, value); }
  Result<std::string> get(const std::string& key, milliseconds timeout) override {
    for (int look = 0; key == roster_ && look < 10 && !has_left_; ++look) pause_for(milliseconds(5));
    return store_->get(key, timeout);
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string roster_;
  const std::atomic<bool>& has_left_;
};

TEST(Goodbye, OfARankThatLeavesAtOnceWaitsForThoseThatStillConnect) {
  const auto all = cluster_options(2);
  MemoryStore store;
  std::atomic<bool> has_left = false;
  run_ranks(2, [&](int rank) {
    const Options& options = all[static_cast<std::size_t>(rank)];
    std::shared_ptr<Store> mine = store.open();
    if (rank == 1) mine = std::make_shared<LateRoster>(std::move(mine), options, has_left);
    const auto client = Client::connect(options, std::move(mine), always);
    ASSERT_TRUE(client.ok()) << client.status().message();
    client.value()->shutdown();
    has_left = true;
  });
}

TEST_IN_VIRTUAL_TIME(Goodbye, OfAllAfterTheLastStepIsNoError) {
  for (const std::size_t first : {0u, 1u, 2u}) {
    TestCluster cluster(cluster_options(3));
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add({vector_layer("small", 10), vector_layer("large", 200'000)});
    cluster.each([&](std::size_t rank, Client& client) {
      for (int step = 0; step < 5; ++step) {
        std::vector<float> small(10, 1.0F);
        std::vector<float> large(200'000, 1.0F);
        EXPECT_TRUE(client.start(layer, bytes_of(small), 1).ok());
        EXPECT_TRUE(client.start(layer + 1, bytes_of(large), 1).ok());
        const Status status = client.wait_all(always);
        EXPECT_TRUE(status.ok()) << status.message();
      }
      if (rank != first) pause_for(milliseconds(20 * rank));
      EXPECT_TRUE(client.status().ok()) << client.status().message();
      client.shutdown();
    });
  }
}

class StorePort : public ::testing::TestWithParam<bool> {};

TEST_P(StorePort, IsFreeForTheSameProcessesAfterTheyHaveShutDown) {
  auto all = cluster_options(2);
  for (Options& options : all) options.on_failure = GetParam() ? OnFailure::rejoin : OnFailure::abort;
  TestCluster first(all);
  ASSERT_TRUE(first.connected());
  for (const std::size_t rank : {1u, 0u}) first.clients[rank]->shutdown();  // the objects stay
  TestCluster second(all);
  ASSERT_TRUE(second.connected());
  for (const std::size_t rank : {0u, 1u}) second.clients[rank]->shutdown();
  TestCluster third(all);
  EXPECT_TRUE(third.connected());
}

INSTANTIATE_TEST_SUITE_P(Rejoins, StorePort, ::testing::Bool());

TEST(StorePort, IsNotWhatARankThatBeginsAnewEarlyMeetsTheOldJobAt) {
  const auto all = cluster_options(2);
  TestCluster first(all);
  ASSERT_TRUE(first.connected());
  first.clients[1]->shutdown();
  Result<std::unique_ptr<Client>> rank1 = Status(ErrorCode::timeout, "not yet");  // stays until rank 0 is connected
  std::thread early([&] { rank1 = Client::connect(all[1], nullptr, always); });
  std::this_thread::sleep_for(milliseconds(200));  // it asks the old store meanwhile, over TCP
  first.clients[0]->shutdown();
  const auto client = Client::connect(all[0], nullptr, always);
  EXPECT_TRUE(client.ok()) << client.status().message();
  early.join();
  EXPECT_TRUE(rank1.ok()) << rank1.status().message();
}

TEST(UnidentifiedConnections, ThatComeToALinkedClientAndSayNothingAreClosed) {
  MemoryStore store;
  auto all = cluster_options(2, milliseconds(1000));
  std::vector<std::unique_ptr<Client>> clients(2);
  run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    clients[index] = std::move(Client::connect(all[index], store.open(), always).value());
  });
  const std::string text = store.open()->get(member_key("default", 0), milliseconds(0)).value();
  ServerWithWorkers others(make_tcp_transport());
  const auto begun = Clock::now();
  const auto silent = others.connect_to(parse_entry(text).member.peer_address);
  silent->receive();
  EXPECT_EQ(silent->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_GT(Clock::now() - begun, milliseconds(700));
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
  for (const auto& client : clients) EXPECT_TRUE(client->status().ok()) << client->status().message();
  run_ranks(2, [&](int rank) { clients[static_cast<std::size_t>(rank)].reset(); });
}

TEST(FlightRecords, AreOfFailuresAndNotOfGenerationsThatArePlanned) {
  for (const bool planned : {true, false}) {
    const TemporaryDirectory records;
    auto all = cluster_options(3);
    for (Options& options : all) options.flight_record = records.path();
    {
      TestCluster cluster(all);
      ASSERT_TRUE(cluster.connected());
      const auto layer = cluster.add({vector_layer("weights", 10)});
      cluster.each([&](std::size_t rank, Client& client) {
        if (rank == 1) return client.abort("a worker joins", planned);
        const Status status = exchange(client, layer, 10);
        EXPECT_EQ(status.code(), ErrorCode::aborted);
        EXPECT_TRUE(contains(status, "a worker joins")) << status.message();
      });
    }
    EXPECT_EQ(records.names().size(), planned ? 0u : 3u);
  }
}

TEST(Interfaces, MayBeOfIPv6) {
  Options alone;
  alone.interfaces = {"::1"};
  const auto server = Server::listen(alone, 0);
  if (!server.ok()) GTEST_SKIP() << "this machine has no IPv6: " << server.status().message();
  EXPECT_TRUE(server.value()->address().starts_with("[::1]:")) << server.value()->address();
  for (const bool dedicated : {false, true}) {
    auto all = cluster_options(2);
    for (Options& options : all) {
      options.master_addr = "::1";
      options.interfaces = {"::1", "127.0.0.1"};
      options.transport = Medium::tcp;
      if (dedicated) options.servers = {server.value()->address()};
    }
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add({vector_layer("weights", 100'000)});
    cluster.each([&](std::size_t, Client& client) { EXPECT_TRUE(exchange(client, layer, 100'000).ok()); });
  }
}

TEST(Frozen, AStoreEndsTheRendezvousSoonAfterTheTimeoutAndIsNamed) {
  auto all = cluster_options(2, milliseconds(2000));
  for (Options& options : all) options.on_failure = OnFailure::rejoin;
  ChildRank child(all[0], {});
  auto store = open_store(all[1], always);
  ASSERT_TRUE(store.ok()) << store.status().message();
  child.stop();
  const auto begun = Clock::now();
  const auto client = Client::connect(all[1], store.value(), always);
  EXPECT_LT(Clock::now() - begun, milliseconds(5000));
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.status().code(), ErrorCode::timeout);
  const std::string where = "127.0.0.1:" + std::to_string(all[1].master_port);
  EXPECT_TRUE(contains(client.status(), where)) << client.status().message();
  EXPECT_TRUE(contains(client.status(), "stopped")) << client.status().message();
}

}  // namespace
}  // namespace poseidon::testing
