// Several ranks of one job in this process.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/world.h"
#include "cpp/rendezvous/memory_store.h"
#include "cpp/rendezvous/ports.h"
#include "poseidon/client.h"
#include "simulation/virtual_time.h"
#include "transport/inproc/inproc_transport.h"
#include "worker/join.h"

namespace poseidon::testing {

inline std::vector<Options> cluster_options(int world_size,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const auto port = World::current() == nullptr ? free_port() : std::uint16_t{1};
  std::vector<Options> all;
  for (int rank = 0; rank < world_size; ++rank) {
    all.push_back(test_options(rank, world_size, port));
    all.back().timeout = timeout;
  }
  return all;
}

/// Returns `shared` with the rank and the addresses of `own`, which is one of `cluster_options`.
inline Options with_place_of(const Options& own, Options shared) {
  shared.rank = own.rank;
  shared.world_size = own.world_size;
  shared.master_port = own.master_port;
  shared.timeout = own.timeout;
  return shared;
}

/// Where the ranks of a job meet: over TCP, and in a simulated world in this process.
class MeetingPlace {
 public:
  Result<std::unique_ptr<Client>> connect(const Options& options) {
    if (World::current() == nullptr) return Client::connect(options, nullptr, always);
    WorkerTransports transports;
    transports.networks.push_back(std::make_unique<Shared>(transport_));
    return join_job(options, store_.open(), always, std::move(transports));
  }
  /// The network in this process.
  Transport& transport() { return *transport_; }

 private:
  class Shared final : public Transport {
   public:
    explicit Shared(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
    Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                             std::function<void(std::shared_ptr<Flow>)> on_accept) override {
      return transport_->listen(loop, address, std::move(on_accept));
    }
    void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
                 std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
      transport_->connect(loop, address, deadline, std::move(done));
    }

   private:
    const std::shared_ptr<Transport> transport_;
  };

  MemoryStore store_;
  const std::shared_ptr<Transport> transport_ = make_inproc_transport();
};

/// Connects all ranks at once. At the end it destroys them, the last rank first.
class TestCluster {
 public:
  explicit TestCluster(const std::vector<Options>& all,
                       std::shared_ptr<MeetingPlace> place = std::make_shared<MeetingPlace>()) {
    clients.resize(all.size());
    run_ranks(static_cast<int>(all.size()), [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      auto client = place->connect(all[index]);
      EXPECT_TRUE(client.ok()) << client.status().message();
      if (client.ok()) clients[index] = std::move(client.value());
    });
  }
  ~TestCluster() {
    run_ranks(static_cast<int>(clients.size()), [this](int rank) { clients[static_cast<std::size_t>(rank)].reset(); });
  }
  TestCluster(const TestCluster&) = delete;
  TestCluster& operator=(const TestCluster&) = delete;

  bool connected() const {
    for (const auto& client : clients)
      if (!client) return false;
    return true;
  }

  /// Adds the same layers on all ranks. Returns the id of the first layer.
  std::uint32_t add(const std::vector<Layer>& layers) {
    std::vector<std::uint32_t> first(clients.size());
    each([&](std::size_t rank, Client& client) {
      auto added = client.add_layers(layers, false, always);
      EXPECT_TRUE(added.ok()) << added.status().message();
      if (added.ok()) first[rank] = added.value().first_layer;
    });
    return first[0];
  }

  /// Calls `body(rank, client)` on one thread for each rank that still exists.
  void each(const std::function<void(std::size_t, Client&)>& body) {
    run_ranks(static_cast<int>(clients.size()), [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      if (clients[index]) body(index, *clients[index]);
    });
  }

  std::vector<std::unique_ptr<Client>> clients;
};

/// Waits until a layer's exchange has started.
inline void await_start(const Client& client, std::uint32_t layer) {
  EXPECT_TRUE(eventually([&] { return !client.done(layer); }));
}

inline Layer vector_layer(const std::string& name, std::size_t element_count, DType dtype = DType::float32,
                          Scheme scheme = Scheme::automatic) {
  Layer layer;
  layer.name = name;
  layer.dtype = dtype;
  layer.element_count = element_count;
  layer.scheme = scheme;
  return layer;
}

inline Layer matrix_layer(const std::string& name, std::size_t rows, std::size_t cols,
                          Scheme scheme = Scheme::automatic, DType dtype = DType::float32) {
  Layer layer = vector_layer(name, rows * cols, dtype, scheme);
  layer.rows = rows;
  layer.cols = cols;
  return layer;
}

inline std::span<std::byte> bytes_of(std::vector<float>& values) { return std::as_writable_bytes(std::span(values)); }

}  // namespace poseidon::testing
