// A job of hundreds of ranks in this process, from the first call of the store to the end of the first step.
// SIMULATION_RANKS says how many ranks there are.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "cpp/rendezvous/memory_store.h"
#include "plan/mesh.h"
#include "simulation/sanitized.h"
#include "simulation/simulation.h"
#include "transport/inproc/inproc_transport.h"
#include "worker/join.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kLayers = 20;
constexpr std::size_t kElements = 1000;
constexpr double kBarSeconds = 5;  // 1,024 ranks on two cores

int rank_count() {
  const char* text = std::getenv("SIMULATION_RANKS");
  return text == nullptr ? (kSanitized ? 80 : 256) : std::atoi(text);
}

double since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

/// What the ranks share.
struct Network {
  std::shared_ptr<Transport> transport = make_inproc_transport();
  std::atomic<std::size_t> connection_count{0};
  MemoryStore store;
  std::atomic<std::size_t> operation_count{0};
};

/// One rank's transport.
class CountingTransport final : public Transport {
 public:
  explicit CountingTransport(Network& network) : network_(network) {}
  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           std::function<void(std::shared_ptr<Flow>)> on_accept) override {
    return network_.transport->listen(loop, address, std::move(on_accept));
  }
  void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
               std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
    ++network_.connection_count;
    network_.transport->connect(loop, address, deadline, std::move(done));
  }

 private:
  Network& network_;
};

/// One rank's access to the store. Whoever waits for a key looks again now and then, which counts once: how often
/// depends on how long the others take to start.
class CountingStore final : public Store {
 public:
  explicit CountingStore(Network& network) : store_(network.store.open()), count_(network.operation_count) {}
  Status set(const std::string& key, const std::string& value) override {
    ++count_;
    return store_->set(key, value);
  }
  Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    if (std::exchange(looked_at_, key) != key) ++count_;
    return store_->get(key, timeout);
  }

 private:
  std::string looked_at_;
  const std::shared_ptr<Store> store_;
  std::atomic<std::size_t>& count_;
};

std::unique_ptr<Client> join(Network& network, int rank, int ranks) {
  Options options = test_options(rank, ranks, 0);
  options.timeout = std::chrono::seconds(100);
  options.priority_classes = 1;  // as Python's default is for so many ranks
  options.dscp = {0};
  WorkerTransports transports;
  transports.networks.push_back(std::make_unique<CountingTransport>(network));
  auto client = join_job(options, std::make_shared<CountingStore>(network), always, std::move(transports));
  EXPECT_TRUE(client.ok()) << client.status().message();
  return client.ok() ? std::move(client.value()) : nullptr;
}

void take_step(Client& client) {
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < kLayers; ++i) layers.push_back(vector_layer("layer " + std::to_string(i), kElements));
  const auto added = client.add_layers(layers, false, always);
  ASSERT_TRUE(added.ok()) << added.status().message();
  std::vector<std::vector<float>> gradients(kLayers, std::vector<float>(kElements, 1.0F));
  for (std::uint32_t i = 0; i < kLayers; ++i)
    ASSERT_TRUE(client.start(added.value().first_layer + i, bytes_of(gradients[i]), 1).ok());
  const Status status = client.wait_all(always);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<float> sum(kElements, static_cast<float>(client.world_size()));
  for (const auto& gradient : gradients) EXPECT_EQ(gradient, sum);
}

TEST(LargeJob, StartsWithFewConnectionsAndFewLooksAtTheStore) {
  const int ranks = rank_count();
  Network network;
  std::vector<std::unique_ptr<Client>> clients(static_cast<std::size_t>(ranks));
  const auto begun = Clock::now();
  run_ranks(ranks, [&](int rank) {
    auto& client = clients[static_cast<std::size_t>(rank)];
    client = join(network, rank, ranks);
    if (client) take_step(*client);
  });
  const double seconds = since(begun);
  const double growth = ranks * std::log2(ranks);
  std::cout << ranks << " ranks: first step after " << seconds << " s (bar for 1,024: " << kBarSeconds << "), "
            << network.operation_count << " store operations (" << static_cast<double>(network.operation_count) / growth
            << " P log2 P), " << network.connection_count << " connections" << std::endl;
  // Ranks look until all have come: so often in the time that this takes without sanitizers.
  if (!kSanitized) EXPECT_LE(static_cast<double>(network.operation_count), 5 * growth);
  // Each rank's servers, and its neighbours once. The first layer of all, which compares plans, takes one server more.
  const std::size_t most = kLayers + 1 + neighbour_count(static_cast<std::size_t>(ranks)) / 2 + 1;
  EXPECT_LE(network.connection_count, most * static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&clients](int rank) { clients[static_cast<std::size_t>(rank)].reset(); });
}

}  // namespace
}  // namespace poseidon::testing
