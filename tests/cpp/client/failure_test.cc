// Failures: each one soon ends the job on every rank, with an error that names the cause.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/client/child_rank.h"
#include "cpp/client/cluster.h"
#include "poseidon/server.h"
#include "rendezvous/members.h"
#include "rendezvous/tcp_store.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

/// Starts `layer` with `value` everywhere and waits.
Status exchange(Client& client, std::uint32_t layer, std::size_t element_count, float value = 1.0F) {
  std::vector<float> gradient(element_count, value);
  if (Status status = client.start(layer, bytes_of(gradient), 1); !status.ok()) return status;
  return client.wait_all(always);
}

void expect_usable(TestCluster& cluster, std::uint32_t layer, std::size_t element_count) {
  const auto world_size = static_cast<float>(cluster.clients.size());
  cluster.each([&](std::size_t, Client& client) {
    std::vector<float> gradient(element_count, 1.0F);
    ASSERT_TRUE(client.start(layer, bytes_of(gradient), 1).ok());
    const Status status = client.wait_all(always);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(gradient, std::vector<float>(element_count, world_size));
  });
}

TEST(AddLayers, RanksThatBuiltDifferentModelsAreNamed) {
  TestCluster cluster(cluster_options(3));
  ASSERT_TRUE(cluster.connected());
  cluster.each([](std::size_t rank, Client& client) {
    const auto added = client.add_layers({vector_layer("weights", rank == 2 ? 11 : 10)}, false, always);
    EXPECT_EQ(added.status().code(), ErrorCode::mismatch);
    const std::string others = rank == 2 ? "that of rank 0, 1" : "that of rank 2";
    EXPECT_TRUE(contains(added.status(), "the plan of rank " + std::to_string(rank))) << added.status().message();
    EXPECT_TRUE(contains(added.status(), others)) << added.status().message();
  });
}

TEST(AddLayers, ARankWhoseLayersMakeNoPlanTellsTheOthers) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  cluster.each([](std::size_t rank, Client& client) {
    const auto added = client.add_layers({vector_layer(rank == 1 ? "" : "weights", 10)}, false, always);
    EXPECT_EQ(added.status().code(), rank == 1 ? ErrorCode::invalid_argument : ErrorCode::aborted);
    EXPECT_TRUE(contains(added.status(), "no name")) << added.status().message();
  });
}

TEST(Start, WhatCannotWorkIsRefusedAndTheClientStaysUsable) {
  auto all = cluster_options(2);
  for (auto& options : all) options.small_bytes = 64;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({vector_layer("floats", 100), vector_layer("integers", 100, DType::int32),
                                  matrix_layer("matrix", 40, 40), vector_layer("small", 3), vector_layer("tiny", 2)});
  std::vector<float> right_size(100);
  std::vector<float> wrong_size(101);
  std::vector<float> matrix(1600);
  Client& client = *cluster.clients[0];
  const auto expect_invalid = [](const Status& status, const std::string& word) {
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(status, word)) << status.message();
  };
  expect_invalid(client.start(first, bytes_of(wrong_size), 1), "404");
  expect_invalid(client.start(first, bytes_of(right_size), 0), "divided by 0");
  expect_invalid(client.start(first + 1, bytes_of(right_size), 2), "int32");
  expect_invalid(client.start(first + 99, bytes_of(right_size), 1), "no layer");
  expect_invalid(client.start_factors(first + 2, DType::float32, {}, bytes_of(matrix), 1, false), "ps");
  expect_invalid(client.start_factors(first + 2, DType::float32, {}, {}, 1, false), "0");
  ASSERT_TRUE(client.start(first, bytes_of(right_size), 1).ok());
  expect_invalid(client.start(first, bytes_of(right_size), 1), "twice");
  std::vector<float> small(3);
  std::vector<float> tiny(2);
  ASSERT_TRUE(client.start(first + 3, bytes_of(small), 2).ok());
  expect_invalid(client.start(first + 4, bytes_of(tiny), 3), "whose divisor is not");
  ASSERT_TRUE(client.start(first + 4, bytes_of(tiny), 2).ok());
  std::vector<float> other(100);
  std::vector<float> other_small(3);
  std::vector<float> other_tiny(2);
  ASSERT_TRUE(cluster.clients[1]->start(first, bytes_of(other), 1).ok());
  ASSERT_TRUE(cluster.clients[1]->start_absent(first + 3, bytes_of(other_small), 2).ok());
  ASSERT_TRUE(cluster.clients[1]->start_absent(first + 4, bytes_of(other_tiny), 2).ok());
  cluster.each([](std::size_t, Client& each) { EXPECT_TRUE(each.wait_all(always).ok()); });
  expect_usable(cluster, first, 100);
}

TEST(Start, FromSeveralThreadsAtOnce) {
  constexpr std::size_t kLayers = 64;
  constexpr std::size_t kThreads = 4;
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < kLayers; ++i) layers.push_back(vector_layer(std::to_string(i), i % 3 == 0 ? 20'000 : i));
  const auto first = cluster.add(layers);
  cluster.each([&](std::size_t, Client& client) {
    std::vector<std::vector<float>> gradients;
    for (const Layer& layer : layers) gradients.emplace_back(layer.element_count, 1.0F);
    for (int step = 0; step < 5; ++step) {
      run_ranks(kThreads, [&](int thread) {
        for (auto i = static_cast<std::size_t>(thread); i < kLayers; i += kThreads)
          EXPECT_TRUE(client.start(first + static_cast<std::uint32_t>(i), bytes_of(gradients[i]), 2).ok());
        EXPECT_TRUE(client.wait_all(always).ok());
      });
      for (const auto& gradient : gradients) EXPECT_EQ(gradient, std::vector<float>(gradient.size(), 1.0F));
    }
  });
}

TEST(Shutdown, OfOneRankAloneIsNamedByTheOthers) {
  TestCluster cluster(cluster_options(3));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  expect_usable(cluster, layer, 5000);
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 1) return client.shutdown();
    const Status status = exchange(client, layer, 5000);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost);
    EXPECT_TRUE(contains(status, "rank 1")) << status.message();
    EXPECT_TRUE(contains(status, "shut down")) << status.message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(2000));
}

TEST(Shutdown, TwiceAndWhatComesAfter) {
  auto all = cluster_options(2);
  for (auto& options : all) options.transport = Medium::tcp;  // only what crosses a network is counted
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 100)});
  std::vector<float> gradient(100);
  cluster.each([&](std::size_t rank, Client& client) {
    client.shutdown();
    client.shutdown();
    if (rank == 1) return;
    EXPECT_EQ(client.start(layer, bytes_of(gradient), 1).code(), ErrorCode::shut_down);
    EXPECT_EQ(client.wait_all(always).code(), ErrorCode::shut_down);
    EXPECT_EQ(client.add_layers({vector_layer("more", 1)}, false, always).status().code(), ErrorCode::shut_down);
    EXPECT_GT(client.traffic().bytes_sent, 0u);
  });
}

TEST(Shutdown, InTheMiddleOfAProductLeavesTheMemoryAlone) {
  constexpr std::size_t kSize = 700;
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({matrix_layer("matrix", kSize, kSize, Scheme::sfb)});
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> rows(200 * kSize, 1.0F);
    std::vector<float> product(kSize * kSize);
    EXPECT_TRUE(client
                    .start_factors(layer, DType::float32, {{bytes_of(rows).data(), bytes_of(rows).data(), 200}},
                                   bytes_of(product), 1, false)
                    .ok());
    cluster.clients[rank].reset();  // waits for nobody; then `rows` and `product` go
  });
}

TEST(Abort, TheReasonReachesAllRanks) {
  TestCluster cluster(cluster_options(3));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 2) client.abort("the loss is not a number");
    const Status status = rank == 2 ? client.wait_all(always) : exchange(client, layer, 5000);
    if (rank == 2 && status.ok()) return;  // it had nothing to wait for
    EXPECT_EQ(status.code(), ErrorCode::aborted);
    EXPECT_TRUE(contains(status, "ended the job: the loss is not a number")) << status.message();
  });
}

TEST(Wait, GivingUpEndsTheOthersToo) {
  TestCluster cluster(cluster_options(3));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> gradient(5000);
    if (rank < 2) EXPECT_TRUE(client.start(layer, bytes_of(gradient), 1).ok());
    if (rank == 2) return;
    const Status status = client.wait_all([rank] { return rank == 1; });
    EXPECT_EQ(status.code(), ErrorCode::aborted);
    EXPECT_TRUE(contains(status, "ended the job: interrupted")) << status.message();
  });
}

TEST(Wait, ARankThatNeverPushesIsNamedWithinTheTimeout) {
  TestCluster cluster(cluster_options(3, milliseconds(1000)));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 1) return;
    const Status status = exchange(client, layer, 5000);
    EXPECT_EQ(status.code(), ErrorCode::timeout);
    EXPECT_TRUE(contains(status, "push of rank 1")) << status.message();
    EXPECT_TRUE(contains(status, "'weights'")) << status.message();
  });
  EXPECT_GT(Clock::now() - begun, milliseconds(700));
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
}

TEST(Wait, ARankThatNeverSendsItsFactorsIsNamedWithinTheTimeout) {
  TestCluster cluster(cluster_options(3, milliseconds(1000)));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({matrix_layer("weights", 20, 20, Scheme::sfb)});
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 1) return;
    const Status status = exchange(client, layer, 400);
    EXPECT_EQ(status.code(), ErrorCode::timeout);
    EXPECT_TRUE(contains(status, "factors of rank 1")) << status.message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(3000));
}

TEST_IN_VIRTUAL_TIME(Schemes, ThatRanksDecideDifferentlyEndInAMismatchOnAll) {
  for (const std::size_t wrong : {0u, 1u, 2u}) {
    auto all = cluster_options(3, milliseconds(3000));
    for (auto& options : all) options.small_bytes = 0;  // small layers would stay with ps
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add({matrix_layer("weights", 64, 64)});
    cluster.each([&](std::size_t rank, Client& client) {
      if (rank == wrong) {
        client.set_factor_count(layer, 3);  // the others keep ps
        pause_for(milliseconds(20));
      }
      const Status status = exchange(client, layer, 64 * 64);
      EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
    });
  }
}

/// The rank sends factors of blocks, and the others push slices. Or one rank pushes slices.
TEST(Schemes, OfShardedFactorsAndPsEndInASentenceAtOnce) {
  for (const std::size_t wrong : {0u, 1u, 2u}) {
    for (const bool others_shard : {false, true}) {
      auto all = cluster_options(3);
      for (auto& options : all) options.small_bytes = 0;
      TestCluster cluster(all);
      ASSERT_TRUE(cluster.connected());
      const auto layer = cluster.add({matrix_layer("weights", 64, 4096)});
      const auto begun = Clock::now();
      std::atomic<int> told = 0;
      cluster.each([&](std::size_t rank, Client& client) {
        if ((rank == wrong) != others_shard) client.set_factor_count(layer, 120);
        EXPECT_EQ(client.next_scheme(layer), (rank == wrong) != others_shard ? Scheme::sharded_factors : Scheme::ps);
        const Status status = exchange(client, layer, 64 * 4096);
        EXPECT_FALSE(status.ok());
        EXPECT_NE(status.code(), ErrorCode::timeout) << status.message();
        if (contains(status, "give the layer the same scheme on all ranks")) ++told;
      });
      EXPECT_GT(told, 0);
      EXPECT_LT(Clock::now() - begun, milliseconds(3000));
    }
  }
}

class LostRank : public ::testing::TestWithParam<Scheme> {};

TEST_P(LostRank, EndsTheOthersWithinASecondAndIsNamed) {
  auto all = cluster_options(3);
  const std::vector<Layer> layers{matrix_layer("weights", 100, 100, GetParam())};
  ChildRank child(all.back(), layers);
  all.pop_back();
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers);
  const auto begun = Clock::now();
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 0) {
      await_start(*cluster.clients[1], layer);
      child.kill();
    }
    const Status status = exchange(client, layer, 10'000);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost);
    EXPECT_TRUE(contains(status, "rank 2")) << status.message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(1100));
}

INSTANTIATE_TEST_SUITE_P(Schemes, LostRank,
                         ::testing::Values(Scheme::ps, Scheme::sfb, Scheme::sharded_factors, Scheme::project_adam));

TEST(Connect, RanksThatDoNotExistAreRefused) {
  for (const auto& [rank, world_size] : {std::pair(2, 2), std::pair(-1, 2), std::pair(0, 0)})
    EXPECT_EQ(Client::connect(test_options(rank, world_size, free_port()), nullptr, always).status().code(),
              ErrorCode::invalid_argument);
}

TEST(Connect, AServerThatIsNotThereIsNamedWithinTheTimeout) {
  auto all = cluster_options(2, milliseconds(700));
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  const auto begun = Clock::now();
  run_ranks(2, [&](int rank) {
    Options options = all[static_cast<std::size_t>(rank)];
    options.servers = {address};
    const auto client = Client::connect(options, nullptr, always);
    EXPECT_EQ(client.status().code(), ErrorCode::unreachable);
    EXPECT_TRUE(contains(client.status(), address)) << client.status().message();
  });
  EXPECT_LT(Clock::now() - begun, milliseconds(4000));
}

TEST(Connect, ARankThatNeverArrivesIsNamed) {
  auto all = cluster_options(3, milliseconds(500));
  run_ranks(2, [&](int rank) {
    const auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
    EXPECT_TRUE(contains(client.status(), "rank 2 of 3")) << client.status().message();
  });
}

TEST(Connect, ARankThatMeetsAndThenSaysNothingIsNamed) {
  const auto all = cluster_options(2, milliseconds(700));
  const auto silent_port = free_port();
  const FileDescriptor silent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_TRUE(bind_reserved(silent.get(), silent_port));
  ASSERT_EQ(::listen(silent.get(), 1), 0);
  const std::string where = "127.0.0.1:" + std::to_string(silent_port);
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      const auto client = Client::connect(all[0], nullptr, always);
      EXPECT_EQ(client.status().code(), ErrorCode::unreachable) << "it accepts, and does not prove who it is";
      EXPECT_TRUE(contains(client.status(), "rank 1")) << client.status().message();
    } else {
      const auto store = open_tcp_store(all[1], always);
      ASSERT_TRUE(store.ok());
      EXPECT_TRUE(meet(*store.value(), all[1], {"elsewhere", {where}, where, {}, {}}, always).ok());
    }
  });
}

std::unique_ptr<Server> listen_server() {
  Options options;
  options.interfaces = {"127.0.0.1"};
  return std::move(Server::listen(options, 0).value());
}

TEST(SharedServer, RefusesTheSameJobTwiceAndTheFirstGoesOn) {
  const auto server = listen_server();
  auto all = cluster_options(2);
  for (auto& options : all) options.servers = {server->address()};
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  Options second = cluster_options(1)[0];
  second.servers = {server->address()};
  const auto refused = Client::connect(second, nullptr, always);
  EXPECT_EQ(refused.status().code(), ErrorCode::refused) << refused.status().message();
  EXPECT_TRUE(contains(refused.status(), "'default'")) << refused.status().message();
  expect_usable(cluster, cluster.add({vector_layer("weights", 5000)}), 5000);
}

TEST(SharedServer, ThatShutsDownIsNamed) {
  const auto server = listen_server();
  auto all = cluster_options(2);
  for (auto& options : all) options.servers = {server->address()};
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 1) {
      await_start(*cluster.clients[0], layer);
      return server->shutdown();
    }
    const Status status = exchange(client, layer, 5000);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost);
    EXPECT_TRUE(contains(status, "server 0")) << status.message();
  });
}

/// A push that is still being made is never sent over the connection, which is gone.
TEST(SharedServer, ThatShutsDownWhileItsPushIsBeingMadeIsNamed) {
  constexpr std::size_t rows = 2000;
  const auto server = listen_server();
  auto all = cluster_options(2);
  for (auto& options : all) options.servers = {server->address()};
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  Layer lossy = matrix_layer("weights", rows, rows, Scheme::powersgd);
  lossy.compression.rows = rows;
  lossy.compression.powersgd_rank = 100;
  const auto layer = cluster.add({lossy});
  std::vector<std::vector<float>> gradients(2, std::vector<float>(rows * rows, 1));
  for (std::size_t rank = 0; rank < 2; ++rank)
    ASSERT_TRUE(cluster.clients[rank]->start(layer, bytes_of(gradients[rank]), 1).ok());
  server->shutdown();
  cluster.each([&](std::size_t, Client& client) {
    const Status status = client.wait(layer, always);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost);
    EXPECT_TRUE(contains(status, "server 0") && contains(status, "shut down")) << status.message();
  });
}

TEST(UnauthenticatedConnections, ToTheStoresPortDoNotDisturb) {
  auto all = cluster_options(2);
  for (Options& options : all) options.on_failure = OnFailure::rejoin;  // others leave nothing open there
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", 5000)});
  const FileDescriptor store = connected_socket(all[0].master_port);
  ASSERT_TRUE(store);
  const std::string garbage(1000, 'G');
  EXPECT_GT(::send(store.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
  expect_usable(cluster, layer, 5000);
}

}  // namespace
}  // namespace poseidon::testing
