// A dedicated server that cuts off a worker before it has answered, because too many come at once, is called again.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "cpp/transport/relay.h"
#include "poseidon/server.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

/// A server behind a relay that cuts off connections, each after the handshake.
class CrowdedServer {
 public:
  explicit CrowdedServer(int cuts) : cuts_left_(cuts) {}

  std::vector<Options> workers(int world_size, milliseconds timeout) {
    auto all = cluster_options(world_size, timeout);
    for (Options& one : all) one.servers = {relay_.address()};
    return all;
  }
  int cuts_left() const { return cuts_left_; }

 private:
  Relay::Verdict meddle(Relay::Way way, std::size_t passed_bytes) {
    if (way == Relay::Way::there || passed_bytes == 0 || cuts_left_ == 0) return Relay::Verdict::pass;
    --cuts_left_;
    return Relay::Verdict::cut;
  }

  std::atomic<int> cuts_left_;
  std::unique_ptr<Server> server_ = std::move(Server::listen(Options(), 0).value());
  Relay relay_{server_->address(),
               [this](Relay::Way way, std::size_t passed_bytes, Relay::Bytes&) { return meddle(way, passed_bytes); }};
};

TEST(CrowdedServer, IsCalledAgain) {
  CrowdedServer server(5);
  TestCluster cluster(server.workers(3, std::chrono::seconds(20)));
  ASSERT_TRUE(cluster.connected());
  cluster.each([](std::size_t, Client& client) {
    const auto added = client.add_layers({vector_layer("weights", 10)}, false, always);
    ASSERT_TRUE(added.ok()) << added.status().message();
    std::vector<float> gradient(10, 1.0F);
    ASSERT_TRUE(client.start(added.value().first_layer, bytes_of(gradient), 1).ok());
    const Status status = client.wait_all(always);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(gradient, std::vector<float>(10, 3.0F));
  });
  EXPECT_EQ(server.cuts_left(), 0);
}

TEST(CrowdedServer, IsNotCalledForever) {
  CrowdedServer server(1 << 20);
  const auto began = Clock::now();
  const auto all = server.workers(2, std::chrono::seconds(2));
  run_ranks(2, [&](int rank) {
    const auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
    EXPECT_FALSE(client.ok());
    EXPECT_TRUE(contains(client.status(), "server 0")) << client.status().message();
  });
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
  EXPECT_LT(server.cuts_left(), (1 << 20) - 2) << "it was called only once by each worker";
}

}  // namespace
}  // namespace poseidon::testing
