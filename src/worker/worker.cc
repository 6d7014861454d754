// Client::connect: puts a worker together. The one place that knows both server and client; they
// themselves meet only in the wire format.
#include <algorithm>
#include <utility>

#include "client/client_impl.h"
#include "poseidon/client.h"
#include "rendezvous/members.h"
#include "rendezvous/tcp_store.h"
#include "server/server_impl.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/traffic_class.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon {

namespace {

constexpr const char* kOwnServer = "server";  // the embedded server's in-process address

/// Adds one transport's address to those of others (members.h).
void append(std::string& addresses, const std::string& address) {
  addresses += (addresses.empty() ? "" : "|") + address;
}

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
    if (Status status = make_transports(); !status.ok()) return status;
    auto hosts = listen_hosts(options_);
    if (!hosts.ok()) return hosts.status();
    Member mine;
    mine.host_id = host_id();
    const auto loop = std::make_shared<Loop>("psd-client");
    if (Status status = open_server(hosts.value(), loop, mine); !status.ok()) return status;
    client_ = std::make_unique<ClientImpl>(options_, cluster(), loop);
    if (Status status = listen_for_peers(hosts.value().front(), mine); !status.ok()) return status;
    auto members = meet(*store_, options_, mine, keep_waiting);
    if (!members.ok()) return members.status();
    if (server_) client_->set_server_traffic([server = server_.get()] { return server->traffic(); });
    auto found = endpoints(members.value());
    if (!found.ok()) return found.status();
    return client_->link(found.value(), keep_waiting);
  }

  int rank() const override { return client_->rank(); }
  int world_size() const override { return client_->world_size(); }
  Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                           const std::function<bool()>& keep_waiting) override {
    return client_->add_layers(std::move(layers), transient, keep_waiting);
  }
  Result<std::size_t> choose_chunk_bytes(std::size_t known, const std::function<bool()>& keep_waiting) override {
    return client_->choose_chunk_bytes(known, keep_waiting);
  }
  Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
               std::uint64_t factor_count) override {
    return client_->start(layer, data, divisor, factor_count);
  }
  Status start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                   std::uint32_t divisor) override {
    return client_->start_all(first_layer, arrays, divisor);
  }
  Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor) override {
    return client_->start_absent(layer, destination, divisor);
  }
  Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                       std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) override {
    return client_->start_factors(layer, dtype, std::move(segments), destination, divisor, accumulate);
  }
  Status push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                   std::uint32_t divisor) override {
    return client_->push_pull(layer, data, destination, divisor);
  }
  Status push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) override {
    return client_->push(layer, data, divisor);
  }
  Status pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array) override {
    return client_->pull(layer, destination, array);
  }
  Status assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array,
                std::uint64_t update_count) override {
    return client_->assign(layer, data, array, update_count);
  }
  Status set_rule(std::uint32_t layer, const UpdateRule& rule) override { return client_->set_rule(layer, rule); }
  Scheme next_scheme(std::uint32_t layer) const override { return client_->next_scheme(layer); }
  void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) override {
    client_->set_factor_count(layer, factor_count);
  }
  std::vector<GatheredPart> gathered(std::uint32_t layer) const override { return client_->gathered(layer); }
  Status wait_all(const std::function<bool()>& keep_waiting) override { return client_->wait_all(keep_waiting); }
  Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) override {
    return client_->wait(layer, keep_waiting);
  }
  bool done(std::uint32_t layer) const override { return client_->done(layer); }
  Status set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                        double priority_threshold) override {
    return client_->set_priorities(first_layer, priorities, priority_threshold);
  }
  std::vector<std::string> notices() const override { return client_->notices(); }
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

  /// RoCE's traffic class is the DSCP and two bits more, which say that ECN is understood; InfiniBand's service
  /// levels rise with the urgency.
  UcxSettings ucx_settings(int priority_class) const {
    const int dscp = traffic_class_of(options_, static_cast<std::size_t>(priority_class)).dscp;
    const int service_level = std::min(7, options_.priority_classes - 1 - priority_class);
    if (dscp == 0 && service_level == 0) return {};
    return {{"IB_TRAFFIC_CLASS", std::to_string(dscp << 2 | 2)}, {"IB_SL", std::to_string(service_level)}};
  }

  Status make_transports() {
    if (options_.transport == Medium::ucx) {
      if (!ucx_available()) return {ErrorCode::invalid_argument, kNoUcx};
      // UCX has a traffic class for all that one transport sends. Dedicated servers have one for all classes.
      const int count = options_.servers.empty() ? options_.priority_classes : 1;
      for (int i = 0; i < count; ++i) networks_.push_back(make_ucx_transport(ucx_settings(i)));
    } else {
      networks_.push_back(make_tcp_transport());
    }
    if (options_.transport == Medium::automatic || options_.transport == Medium::shm) shm_ = make_shm_transport();
    return {};
  }

  /// Every worker hosts a server unless dedicated ones do. Its cores take the interfaces in turn.
  Status open_server(const std::vector<std::string>& hosts, const std::shared_ptr<Loop>& client_loop, Member& mine) {
    if (!options_.servers.empty()) return {};
    std::vector<std::shared_ptr<Loop>> loops;
    if (options_.server_cores == 0 && options_.interfaces.size() <= 1) loops.push_back(client_loop);
    server_ = std::make_unique<ServerImpl>(options_, std::move(loops));
    std::vector<std::string> addresses;
    for (std::size_t core = 0; core < server_->core_count(); ++core)
      addresses.push_back(hosts[core % hosts.size()] + ":0");
    mine.server_addresses.resize(server_->core_count());
    for (const auto& network : networks_) {
      if (Status status = server_->listen(*network, addresses); !status.ok()) return status;
      for (std::size_t core = 0; core < server_->core_count(); ++core)
        append(mine.server_addresses[core], server_->last_addresses()[core]);
    }
    if (shm_) {
      if (Status status = server_->listen(*shm_, ":0"); !status.ok()) return status;
      mine.server_shm_addresses = server_->last_addresses();
    }
    if (Status status = server_->listen(*inproc_, kOwnServer); !status.ok()) return status;
    own_addresses_ = server_->last_addresses();
    return {};
  }

  Status listen_for_peers(const std::string& host, Member& mine) {
    for (const auto& network : networks_) {
      auto address = client_->listen(*network, host + ":0");
      if (!address.ok()) return address.status();
      append(mine.peer_address, address.value());
    }
    if (!shm_) return {};
    auto shm_address = client_->listen(*shm_, ":0");
    if (!shm_address.ok()) return shm_address.status();
    mine.peer_shm_address = shm_address.value();
    return {};
  }

  /// Whether to talk to a member through shared memory.
  Result<bool> shares_memory(const std::vector<Member>& members, int rank) const {
    const Member& other = members[static_cast<std::size_t>(rank)];
    const bool near = other.host_id == members[static_cast<std::size_t>(options_.rank)].host_id;
    if (shm_ && near && !other.peer_shm_address.empty()) return true;
    if (options_.transport != Medium::shm || rank == options_.rank) return false;
    return Status(ErrorCode::unreachable, "transport=shm, but rank " + std::to_string(rank) +
                                              " shares no memory with rank " + std::to_string(options_.rank) +
                                              "; use transport=auto");
  }

  Result<Endpoints> endpoints(const std::vector<Member>& members) const {
    Endpoints endpoints;
    Endpoints::Transports networks;
    for (const auto& network : networks_) networks.push_back(network.get());
    for (const auto& address : options_.servers) endpoints.servers.push_back({networks, {address}, true, false});
    for (int rank = 0; rank < options_.world_size; ++rank) {
      const Member& member = members[static_cast<std::size_t>(rank)];
      auto shm = shares_memory(members, rank);
      if (!shm.ok()) return shm.status();
      const auto transports = shm.value() ? Endpoints::Transports{shm_.get()} : networks;
      endpoints.peers.push_back({transports, shm.value() ? member.peer_shm_address : member.peer_address});
      if (!options_.servers.empty()) continue;
      if (rank == options_.rank)
        endpoints.servers.push_back({{inproc_.get()}, own_addresses_, false, true});
      else
        endpoints.servers.push_back(
            {transports, shm.value() ? member.server_shm_addresses : member.server_addresses, false, false});
    }
    return endpoints;
  }

  const Options options_;
  std::shared_ptr<Store> store_;
  std::vector<std::unique_ptr<Transport>> networks_;  // TCP, or UCX by priority class
  std::unique_ptr<Transport> shm_;                    // null where it is not wanted
  std::unique_ptr<Transport> inproc_ = make_inproc_transport();
  std::vector<std::string> own_addresses_;  // of the embedded server's cores, in this process
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
