// A rank that leaves while others are late: what it has contributed to still comes to its end, and nothing else does.
#include <gtest/gtest.h>

#include <array>
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
#include "poseidon/server.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kRows = 40;
constexpr std::size_t kCols = 50;
constexpr std::size_t kSize = kRows * kCols;
constexpr std::uint32_t kFirstLayer = 1;  // of those that a test adds

std::vector<float> ones() { return std::vector<float>(kSize, 1.0F); }

/// What a rank contributes: an array, or factors that stand for one. It must live until the exchange has ended.
struct Part {
  std::vector<float> left = std::vector<float>(kRows, 1.0F);
  std::vector<float> right = std::vector<float>(kCols, 1.0F);
  std::vector<float> array = ones();

  Status start(Client& client, std::uint32_t layer) {
    if (client.next_scheme(layer) == Scheme::ps) return client.start(layer, bytes_of(array), 1);
    return client.start_factors(layer, DType::float32, {{bytes_of(left).data(), bytes_of(right).data(), 1}},
                                bytes_of(array), 1, false);
  }
};

/// Where the ranks exchange, and how.
struct Place {
  const char* name;
  Scheme scheme;
  bool dedicated;
  int server_cores;
  Medium transport;
};

class LateRank : public ::testing::TestWithParam<Place> {
 protected:
  /// The options of ranks that meet at this place, where the server waits for them, if there is one.
  std::vector<Options> options(int world_size, milliseconds timeout = std::chrono::seconds(20)) {
    serve();
    return options_before_serving(world_size, timeout);
  }
  /// The same before the server runs, and so before this process has threads: call serve() then.
  std::vector<Options> options_before_serving(int world_size, milliseconds timeout = std::chrono::seconds(20)) const {
    auto all = cluster_options(world_size, timeout);
    for (Options& one : all) {
      if (GetParam().dedicated) one.servers = {"127.0.0.1:" + std::to_string(port_)};
      one.server_cores = GetParam().server_cores;
      one.transport = GetParam().transport;
      one.flows = 2;
      one.chunk_bytes = kSize;  // several chunks, which lie on all servers
      one.small_bytes = 0;      // each layer is exchanged by itself
    }
    return all;
  }
  void serve() {
    if (GetParam().dedicated && !server_) server_ = std::move(Server::listen(Options(), port_).value());
  }
  std::vector<Layer> layers() const {
    std::vector<Layer> all;
    for (const char* name : {"first", "second"}) all.push_back(matrix_layer(name, kRows, kCols, GetParam().scheme));
    return all;
  }

 private:
  std::uint16_t port_ = free_port();
  std::unique_ptr<Server> server_;
};

/// Leaves, and notes when it has said so.
void leave(Client& client, std::atomic<bool>& leaving) {
  client.shutdown([&leaving] {
    leaving = true;
    return true;
  });
}

void wait_for(const std::atomic<bool>& flag) {
  EXPECT_TRUE(eventually([&flag] { return flag.load(); })) << "the other rank has left without waiting";
}

TEST_P(LateRank, StillExchangesWithRanksThatLeave) {
  TestCluster cluster(options(3));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers());
  std::array<std::atomic<bool>, 2> leaving{};
  cluster.each([&](std::size_t rank, Client& client) {
    Part first;
    Part second;
    if (rank == 2)
      for (const auto& one : leaving) wait_for(one);
    EXPECT_TRUE(first.start(client, layer).ok());
    EXPECT_TRUE(second.start(client, layer + 1).ok());
    if (rank < 2) {
      leave(client, leaving[rank]);
    } else {
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    const std::vector<float> sum(kSize, 3.0F);
    EXPECT_EQ(first.array, sum) << "rank " << rank;
    EXPECT_EQ(second.array, sum) << "rank " << rank;
    if (rank < 2) EXPECT_EQ(client.status().code(), ErrorCode::shut_down);
  });
}

TEST_P(LateRank, IsToldAtOnceWhatARankThatLeavesHasNotContributedTo) {
  const TemporaryDirectory records;
  auto all = options(2);
  all[0].flight_record = records.path();
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers());
  std::atomic<bool> leaving = false;
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    Part part;
    if (rank == 0) {
      EXPECT_TRUE(part.start(client, layer).ok());
      leave(client, leaving);
      EXPECT_EQ(client.status().code(), ErrorCode::shut_down) << client.status().message();
      return;
    }
    wait_for(leaving);
    if (Status status = part.start(client, layer + 1); !status.ok()) FAIL() << status.message();
    const Status status = client.wait_all(always);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost) << status.message();
    EXPECT_TRUE(contains(status, "rank 0")) << status.message();
    EXPECT_TRUE(contains(status, "has shut down")) << status.message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
  EXPECT_EQ(records.names().size(), 0u);  // who leaves has not failed
}

TEST_P(LateRank, ThatNeverContributesKeepsNobodyWhenItLeaves) {
  TestCluster cluster(options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers());
  std::atomic<bool> leaving = false;
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    Part part;
    if (rank == 0)
      EXPECT_TRUE(part.start(client, layer).ok());
    else
      wait_for(leaving);
    leave(client, leaving);
    EXPECT_EQ(client.status().code(), ErrorCode::shut_down) << client.status().message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
}

TEST_P(LateRank, ThatStaysAndNeverContributesIsWaitedForUpToTheTimeout) {
  TestCluster cluster(options(2, milliseconds(1000)));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers());
  Part part;
  ASSERT_TRUE(part.start(*cluster.clients[0], layer).ok());
  const auto begun = Clock::now();
  cluster.clients[0]->shutdown();
  EXPECT_GT(Clock::now() - begun, milliseconds(500));
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
  EXPECT_EQ(cluster.clients[0]->status().code(), ErrorCode::shut_down);
}

TEST_P(LateRank, IsNotWaitedForByWhoeverIsInterruptedOrHasFailed) {
  for (const bool fails : {true, false}) {
    TestCluster cluster(options(2));
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add(layers());
    Part part;
    ASSERT_TRUE(part.start(*cluster.clients[0], layer).ok());
    const auto begun = Clock::now();
    if (fails) cluster.clients[0]->abort("the loss is not a number");
    cluster.clients[0]->shutdown([fails] { return fails; });
    EXPECT_LT(Clock::now() - begun, milliseconds(3000));
    EXPECT_EQ(cluster.clients[0]->status().code(), fails ? ErrorCode::aborted : ErrorCode::shut_down);
    cluster.clients[0]->shutdown();  // has no effect
  }
}

TEST_P(LateRank, ThatDiesKeepsNobodyThatLeaves) {
  const auto all = options_before_serving(2);
  ChildRank child(all[1], layers());
  serve();
  auto client = Client::connect(all[0], nullptr, always);
  ASSERT_TRUE(client.ok()) << client.status().message();
  const auto added = client.value()->add_layers(layers(), false, always);
  ASSERT_TRUE(added.ok()) << added.status().message();
  Part part;
  ASSERT_TRUE(part.start(*client.value(), added.value().first_layer).ok());
  const auto begun = Clock::now();
  client.value()->shutdown([&child, killed = false]() mutable {
    if (!std::exchange(killed, true)) child.kill();
    return true;
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(5000));
  EXPECT_EQ(client.value()->status().code(), ErrorCode::shut_down);
}

TEST_P(LateRank, LearnsAtOnceThatARankHasDiedWhileItLeft) {
  if (GetParam().dedicated && GetParam().scheme == Scheme::sfb)
    GTEST_SKIP() << "the others have its factors already and need nothing more of it";
  const auto all = options_before_serving(3);
  ChildRank child(all[2], layers(), [](Client& client) {
    Part part;
    if (part.start(client, kFirstLayer).ok()) client.shutdown();
  });
  serve();
  std::vector<std::unique_ptr<Client>> clients(2);
  std::array<std::uint32_t, 2> first_layers{};
  run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    clients[index] = std::move(Client::connect(all[index], nullptr, always).value());
    first_layers[index] = clients[index]->add_layers(layers(), false, always).value().first_layer;
  });
  const std::uint32_t layer = first_layers[0];
  ASSERT_EQ(layer, kFirstLayer);
  Part part;
  ASSERT_TRUE(part.start(*clients[0], layer).ok());  // rank 1 never does
  std::this_thread::sleep_for(milliseconds(300));  // another process leaves meanwhile, and nothing is to be seen of it
  EXPECT_TRUE(clients[0]->status().ok()) << clients[0]->status().message();
  const auto begun = Clock::now();
  child.kill();
  const Status status = clients[0]->wait_all(always);
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
  EXPECT_EQ(status.code(), ErrorCode::peer_lost) << status.message();
  EXPECT_TRUE(contains(status, "rank 2")) << status.message();
}

INSTANTIATE_TEST_SUITE_P(Places, LateRank,
                         ::testing::Values(Place{"ps", Scheme::ps, false, 1, Medium::automatic},
                                           Place{"ps_on_the_clients_loop", Scheme::ps, false, 0, Medium::tcp},
                                           Place{"ps_on_several_cores", Scheme::ps, false, 2, Medium::tcp},
                                           Place{"ps_on_a_dedicated_server", Scheme::ps, true, 1, Medium::tcp},
                                           Place{"sfb", Scheme::sfb, false, 1, Medium::automatic},
                                           Place{"sfb_with_a_dedicated_server", Scheme::sfb, true, 1, Medium::tcp},
                                           Place{"sharded_factors", Scheme::sharded_factors, false, 1, Medium::tcp},
                                           Place{"project_adam", Scheme::project_adam, false, 1, Medium::automatic}),
                         [](const auto& place) { return std::string(place.param.name); });

}  // namespace
}  // namespace poseidon::testing
