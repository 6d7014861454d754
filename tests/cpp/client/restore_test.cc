// Jobs whose servers write checkpoints. They end and start again with other servers, from the same bits.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpp/base/temporary_directory.h"
#include "cpp/client/cluster.h"
#include "cpp/server/chunk/reference_update.h"
#include "poseidon/checkpoint.h"
#include "poseidon/server.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kLayerCount = 3;

/// The servers and options of one run of a job.
struct Shape {
  int world_size = 1;
  int server_count = 0;  // dedicated ones; 0: embedded
  int server_cores = 1;
  std::size_t chunk_bytes = 4096;
};

/// Steps on layers of several sizes, each with its own rule. They are compared with updates of whole arrays in this
/// process.
class Restored : public ::testing::Test {
 protected:
  static std::vector<Layer> layers() {
    std::vector<Layer> all{vector_layer("weight", 20'000), vector_layer("bias", 37, DType::float64),
                           vector_layer("scale", 3000)};
    for (Layer& layer : all) layer.stored = true;
    return all;
  }
  static UpdateRule rule(std::size_t layer) { return update_rules()[std::vector<std::size_t>{1, 3, 4}[layer]]; }
  static Bytes reals(std::size_t layer, std::uint64_t step, int rank) {
    std::seed_seq sequence{static_cast<std::uint64_t>(layer), step, static_cast<std::uint64_t>(rank)};
    std::mt19937 random(sequence);
    return random_reals(random, layers()[layer].dtype, layers()[layer].element_count);
  }

  Restored() {
    for (std::size_t i = 0; i < kLayerCount; ++i) references_.emplace_back(reals(i, 0, 0), layers()[i].dtype);
  }

  /// Runs a job from its checkpoint until it has made the training's steps up to `last`.
  void run(const Shape& shape, std::uint64_t last, std::uint64_t expected_version) {
    Options server_options;
    server_options.checkpoint_dir = directory_.path();
    server_options.checkpoint_every = 2;
    server_options.server_cores = shape.server_cores;
    std::vector<std::unique_ptr<Server>> servers;
    auto all = cluster_options(shape.world_size);
    for (int i = 0; i < shape.server_count; ++i) {
      servers.push_back(std::move(Server::listen(server_options, 0).value()));
      for (Options& options : all) options.servers.push_back(servers.back()->address());
    }
    for (Options& options : all) {
      options.chunk_bytes = shape.chunk_bytes;
      if (shape.server_count == 0) {
        options.checkpoint_dir = server_options.checkpoint_dir;
        options.checkpoint_every = server_options.checkpoint_every;
        options.server_cores = shape.server_cores;
      }
    }
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    const std::uint32_t first = cluster.add(layers());
    cluster.each([&](std::size_t rank, Client& client) {
      if (rank == 0) begin(client, first, expected_version);
    });
    for (std::uint64_t step = expected_version + 1; step <= last && !HasFailure(); ++step) {
      step_all(cluster, first, step, shape.world_size);
    }
  }

  void begin(Client& client, std::uint32_t first, std::uint64_t expected_version) {
    for (std::uint32_t i = 0; i < kLayerCount; ++i) {
      Bytes value(layers()[i].size_bytes());
      ASSERT_TRUE(client.restore(first + i, value).ok());
      ASSERT_TRUE(client.wait(first + i, always).ok()) << client.wait(first + i, always).message();
      const LayerStats stats = client.layer_stats(first + i);
      EXPECT_EQ(stats.oldest_version, expected_version);
      EXPECT_EQ(stats.newest_version, expected_version);
      if (expected_version > 0) {
        EXPECT_EQ(value, references_[i].value) << layers()[i].name;
        EXPECT_EQ(stats.update_count, expected_version);
      } else {
        ASSERT_TRUE(client.assign(first + i, references_[i].value).ok());
        ASSERT_TRUE(client.wait(first + i, always).ok());
      }
    }
  }

  void step_all(TestCluster& cluster, std::uint32_t first, std::uint64_t step, int world_size) {
    // Every rank has the same gradient: the sum of two is exact, so the mean does not depend on their number.
    for (std::size_t i = 0; i < kLayerCount; ++i) references_[i].update(rule(i), reals(i, step, 0));
    cluster.each([&](std::size_t, Client& client) {
      for (std::uint32_t i = 0; i < kLayerCount; ++i) {
        const Bytes gradient = reals(i, step, 0);
        Bytes value(gradient.size());
        ASSERT_TRUE(client.set_rule(first + i, rule(i)).ok());
        ASSERT_TRUE(client.push_pull(first + i, gradient, value, static_cast<std::uint32_t>(world_size)).ok());
        const Status status = client.wait(first + i, always);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(value, references_[i].value) << layers()[i].name << " in step " << step;
      }
    });
  }

  TemporaryDirectory directory_;
  std::vector<ReferenceParameters> references_;
};

TEST_F(Restored, OnOtherServersWithTheSameBits) {
  run({1, 3, 2, 4096}, 2, 0);
  run({1, 1, 1, 65536}, 4, 2);
  run({2, 0, 1, 1024}, 6, 4);
  run({2, 2, 2, 2048}, 8, 6);
  const auto listed = list_checkpoints(directory_.path(), true).value();
  ASSERT_EQ(listed.size(), 2u);
  EXPECT_EQ(listed[0].version, 8u);
  EXPECT_TRUE(listed[0].complete) << listed[0].problem;
  EXPECT_EQ(listed[0].unit_count, kLayerCount);
}

TEST_F(Restored, ALayerThatTheServersDoNotStoreIsRefused) {
  TestCluster cluster(cluster_options(1));
  const std::uint32_t first = cluster.add({vector_layer("w", 10)});
  std::vector<float> value(10);
  EXPECT_EQ(cluster.clients[0]->restore(first, bytes_of(value)).code(), ErrorCode::invalid_argument);
}

TEST_F(Restored, ServersWithoutADirectoryHaveNothing) {
  TestCluster cluster(cluster_options(2));
  const std::uint32_t first = cluster.add(layers());
  Bytes value(layers()[0].size_bytes(), std::byte{5});
  const Bytes before = value;
  ASSERT_TRUE(cluster.clients[0]->restore(first, value).ok());
  ASSERT_TRUE(cluster.clients[0]->wait(first, always).ok());
  EXPECT_EQ(cluster.clients[0]->layer_stats(first).newest_version, 0u);
  EXPECT_EQ(value, before);
}

TEST_F(Restored, ADirectoryThatCannotBeUsedIsAnErrorAtTheStart) {
  Options options;
  options.checkpoint_dir = "/proc/none";
  const auto server = Server::listen(options, 0);
  EXPECT_EQ(server.status().code(), ErrorCode::invalid_argument);
  EXPECT_NE(server.status().message().find("checkpoint_dir"), std::string::npos) << server.status().message();
}

TEST_F(Restored, TheSameJobAnewIsRefusedOnRankZero) {
  run({1, 1, 1, 4096}, 2, 0);
  auto all = cluster_options(1);
  all[0].checkpoint_dir = directory_.path();
  TestCluster cluster(all);
  const std::uint32_t first = cluster.add(layers());
  ASSERT_TRUE(cluster.clients[0]->assign(first, references_[0].value).ok());
  Bytes value(references_[0].value.size());
  static_cast<void>(cluster.clients[0]->wait(first, always));
  static_cast<void>(cluster.clients[0]->pull(first, value));
  const Status status = cluster.clients[0]->wait(first, always);
  EXPECT_EQ(status.code(), ErrorCode::refused);
  EXPECT_TRUE(contains(status, "resume=True")) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
