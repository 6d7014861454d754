// The thread on which a worker looks up the names of its servers.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/rendezvous/memory_store.h"
#include "poseidon/server.h"
#include "transport/tcp/tcp_transport.h"
#include "worker/join.h"

namespace poseidon::testing {
namespace {

/// TCP that records the addresses to which a loop's own thread connects. There a slow name server would block the loop.
class WatchedTransport final : public Transport {
 public:
  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           std::function<void(std::shared_ptr<Flow>)> on_accept) override {
    return tcp_->listen(loop, address, std::move(on_accept));
  }
  void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
               std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
    {
      const std::lock_guard lock(mutex_);
      (loop.in_loop_thread() ? on_loop : elsewhere).push_back(address);
    }
    tcp_->connect(loop, address, deadline, std::move(done));
  }

  std::vector<std::string> on_loop;
  std::vector<std::string> elsewhere;

 private:
  const std::unique_ptr<Transport> tcp_ = make_tcp_transport();
  std::mutex mutex_;
};

TEST(ServerNames, AreNotLookedUpOnALoop) {
  Options server_options;
  server_options.server_cores = 2;
  server_options.interfaces = {"0.0.0.0"};
  server_options.server_memory = std::size_t{1} << 30;
  const auto port = free_port();
  auto server = Server::listen(server_options, port);
  ASSERT_TRUE(server.ok()) << server.status().message();
  Options options = test_options(0, 1, free_port());
  options.servers = {"localhost:" + std::to_string(port)};
  auto transport = std::make_unique<WatchedTransport>();
  const WatchedTransport& watched = *transport;
  WorkerTransports transports;
  transports.networks.push_back(std::move(transport));
  MemoryStore store;
  auto client = join_job(options, store.open(), always, std::move(transports));
  ASSERT_TRUE(client.ok()) << client.status().message();
  EXPECT_EQ(watched.elsewhere, options.servers);
  EXPECT_EQ(watched.on_loop.size(), 3u) << "one more class, and the second core's two";
  for (const std::string& address : watched.on_loop) EXPECT_EQ(address.find("localhost"), std::string::npos) << address;
}

}  // namespace
}  // namespace poseidon::testing
