// Client::connect: puts a worker together. The one place that knows both server and client; they
// themselves meet only in the wire format.
#include <utility>

#include "client/client_impl.h"
#include "poseidon/client.h"
#include "rendezvous/members.h"
#include "rendezvous/tcp_store.h"
#include "server/server_impl.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {

namespace {

constexpr const char* kOwnShard = "shard";  // the embedded server's in-process address

/// A client and what must outlive it, destroyed in reverse order: client, shard, transports, store.
class Worker final : public Client {
 public:
  Worker(const Options& options, std::shared_ptr<Store> store) : options_(options), store_(std::move(store)) {}
  ~Worker() override {
    if (client_) shutdown();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  Status connect(const std::function<bool()>& keep_waiting) {
    auto host = listen_host(options_);
    if (!host.ok()) return host.status();
    Member mine;
    if (Status status = open_shard(host.value(), mine); !status.ok()) return status;
    client_ = std::make_unique<ClientImpl>(options_, cluster(), *tcp_);
    auto peer_address = client_->listen(host.value());
    if (!peer_address.ok()) return peer_address.status();
    mine.peer_address = peer_address.value();
    auto members = meet(*store_, options_, mine, keep_waiting);
    if (!members.ok()) return members.status();
    if (server_) client_->set_server_traffic([server = server_.get()] { return server->traffic(); });
    return client_->link(endpoints(members.value()), keep_waiting);
  }

  int rank() const override { return client_->rank(); }
  int world_size() const override { return client_->world_size(); }
  Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                           const std::function<bool()>& keep_waiting) override {
    return client_->add_layers(std::move(layers), transient, keep_waiting);
  }
  Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
               std::uint64_t factor_count) override {
    return client_->start(layer, data, divisor, factor_count);
  }
  Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor) override {
    return client_->start_absent(layer, destination, divisor);
  }
  Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                       std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) override {
    return client_->start_factors(layer, dtype, std::move(segments), destination, divisor, accumulate);
  }
  Scheme next_scheme(std::uint32_t layer) const override { return client_->next_scheme(layer); }
  void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) override {
    client_->set_factor_count(layer, factor_count);
  }
  std::vector<GatheredPart> gathered(std::uint32_t layer) const override { return client_->gathered(layer); }
  Status wait_all(const std::function<bool()>& keep_waiting) override { return client_->wait_all(keep_waiting); }
  Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) override {
    return client_->wait(layer, keep_waiting);
  }
  LayerStats layer_stats(std::uint32_t layer) const override { return client_->layer_stats(layer); }
  TrafficStats traffic() const override { return client_->traffic(); }
  void abort(const std::string& reason) override { client_->abort(reason); }
  void shutdown() override {
    const bool failed = client_->failed();
    client_->shutdown();
    if (!server_) return;
    // This rank may be done while its shard still sends the last results over a slow link.
    if (failed)
      server_->shutdown();
    else
      server_->shutdown(options_.timeout);
  }

 private:
  Cluster cluster() const {
    Cluster cluster;
    cluster.worker_count = options_.world_size;
    cluster.placement = options_.servers.empty() ? Placement::colocated : Placement::dedicated;
    cluster.server_count = options_.servers.empty() ? options_.world_size : static_cast<int>(options_.servers.size());
    return cluster;
  }

  /// Every worker hosts a shard unless dedicated servers do.
  Status open_shard(const std::string& host, Member& mine) {
    if (!options_.servers.empty()) return {};
    server_ = std::make_unique<ServerImpl>(options_);
    if (Status status = server_->listen(*tcp_, host + ":0"); !status.ok()) return status;
    mine.server_address = server_->address();
    return server_->listen(*inproc_, kOwnShard);
  }

  Endpoints endpoints(const std::vector<Member>& members) const {
    Endpoints endpoints;
    for (const auto& address : options_.servers) endpoints.servers.push_back({tcp_.get(), address, false});
    for (int rank = 0; rank < options_.world_size; ++rank) {
      const Member& member = members[static_cast<std::size_t>(rank)];
      endpoints.peers.push_back(member.peer_address);
      if (!options_.servers.empty()) continue;
      if (rank == options_.rank)
        endpoints.servers.push_back({inproc_.get(), kOwnShard, true});
      else
        endpoints.servers.push_back({tcp_.get(), member.server_address, false});
    }
    return endpoints;
  }

  const Options options_;
  std::shared_ptr<Store> store_;
  std::unique_ptr<Transport> tcp_ = make_tcp_transport();
  std::unique_ptr<Transport> inproc_ = make_inproc_transport();
  std::unique_ptr<ServerImpl> server_;
  std::unique_ptr<ClientImpl> client_;
};

}  // namespace

Result<std::unique_ptr<Client>> Client::connect(const Options& options, std::shared_ptr<Store> store,
                                                const std::function<bool()>& keep_waiting) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    return Status(ErrorCode::invalid_argument, "rank " + std::to_string(options.rank) + " of " +
                                                   std::to_string(options.world_size) + " does not exist");
  if (!store) {
    auto opened = open_tcp_store(options, keep_waiting);
    if (!opened.ok()) return opened.status();
    store = std::move(opened.value());
  }
  auto worker = std::make_unique<Worker>(options, std::move(store));
  if (Status status = worker->connect(keep_waiting); !status.ok()) return status;
  return std::unique_ptr<Client>(std::move(worker));
}

}  // namespace poseidon
