#include "worker/join.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/descriptor_limit.h"
#include "base/host.h"
#include "base/wipe.h"
#include "client/client_impl.h"
#include "plan/hosts.h"
#include "poseidon/features.h"
#include "rendezvous/hosts.h"
#include "rendezvous/members.h"
#include "rendezvous/newcomers.h"
#include "server/server_impl.h"
#include "worker/generation_parts.h"

namespace poseidon {

namespace {

constexpr std::size_t kShmFlowDescriptors = 3;  // a socket and one eventfd for each end
constexpr const char* kOwnServer = "server";    // the embedded server's in-process address

/// Appends one transport's address to those of other transports (members.h).
void append(std::string& addresses, const std::string& address) {
  addresses += (addresses.empty() ? "" : "|") + address;
}

/// Whether the job may go on without the process to which connecting has failed.
bool others_may_go_on(const Status& status) {
  return status.code() == ErrorCode::peer_lost || status.code() == ErrorCode::aborted ||
         status.code() == ErrorCode::unreachable || status.code() == ErrorCode::refused;
}

bool is_loopback(const std::string& host) { return host.starts_with("127.") || host == "::1"; }

std::string open_to_all(const std::string& host) {
  return "this job has no secret: every process that can connect to " + host +
         " can take part in it; give all processes the same POSEIDON_SECRET or secret_file (SECURITY.md)";
}

/// Returns the options without the secret, which only the transports need.
Options without_secret(const Options& options) {
  Options rest = options;
  wipe(rest.secret);
  return rest;
}

/// One process joins a job: it meets the other workers and connects its client to them and to their servers.
class JobJoin {
 public:
  JobJoin(const Options& options, std::shared_ptr<Store> store, WorkerTransports transports)
      : given_(without_secret(options)),
        has_secret_(!options.secret.empty()),
        options_(given_),
        store_(std::move(store)),
        transports_(std::make_shared<const WorkerTransports>(std::move(transports))) {}

  /// Forms generations until one succeeds, or until one fails for a reason that another generation would not change.
  Result<std::unique_ptr<Client>> connect(const std::function<bool()>& keep_waiting) {
    const auto deadline = Clock::now() + given_.timeout;
    bool interrupted = false;
    const auto ask = [&] {
      interrupted = interrupted || !keep_waiting();
      return !interrupted;
    };
    for (std::uint32_t at_least = 1;; at_least = membership_->generation + 1) {
      membership_.reset();
      Status status = form(at_least, ask);
      if (status.ok()) {
        // With OnFailure::abort the workers meet only once, so the store is dropped. A rank that starts again must not
        // find the entries of this run.
        if (given_.on_failure != OnFailure::abort) parts_->set_store(store_);
        return std::unique_ptr<Client>(std::move(client_));
      }
      if (given_.on_failure == OnFailure::abort || !membership_) return status;
      // Tells the processes that have not noticed the failure yet, so that they do not wait for this process.
      want_generation(*store_, given_.job, membership_->generation + 1);
      if (interrupted || !others_may_go_on(status) || Clock::now() > deadline) return status;
      client_.reset();
    }
  }

 private:
  /// Tries once to meet the others and to connect to them. `membership_` is set when they have met.
  Status form(std::uint32_t at_least, const std::function<bool()>& keep_waiting) {
    auto hosts = listen_hosts(given_);
    if (!hosts.ok()) return hosts.status();
    const auto reached = std::ranges::find_if_not(hosts.value(), is_loopback);
    Member mine;
    mine.host_id = given_.machine + host_id();
    mine.rack = given_.rack;
    mine.host_name = host_name();
    const auto loop = std::make_shared<Loop>("psd-client");
    auto parts = std::make_unique<GenerationParts>(transports_, given_.timeout);
    parts_ = parts.get();
    // Others connect as soon as they know the addresses, so the limit is raised before. If it cannot be raised, that is
    // no error yet: the number that is needed is known later.
    static_cast<void>(make_room_for_descriptors(most_descriptors()));
    if (Status status = open_server(hosts.value(), loop, mine); !status.ok()) return status;
    auto lobby = std::make_unique<Lobby>(loop);
    if (Status status = listen_for_peers(*lobby, hosts.value().front(), mine); !status.ok()) return status;
    auto membership = meet(*store_, given_, mine, keep_waiting, at_least);
    options_ = given_;
    if (membership.ok()) {
      membership_ = std::move(membership.value());
      options_.rank = membership_->rank;
      options_.world_size = static_cast<int>(membership_->members.size());
      options_.generation = membership_->generation;
    }
    if (!has_secret_ && reached != hosts.value().end() && options_.rank == 0) parts->add_notice(open_to_all(*reached));
    const Seat seat{given_.rank, membership_ && membership_->joining};
    const Cluster made_of = cluster();
    client_ = std::make_unique<ClientImpl>(options_, made_of, seat, std::move(parts), loop, std::move(lobby));
    if (!membership_) return client_->fail_to_join(membership.status());
    if (ServerImpl* server = parts_->server())
      client_->set_server_report([server](JsonWriter& json, std::int64_t time_ns) { server->report(json, time_ns); });
    auto found = endpoints();
    if (!found.ok()) return client_->fail_to_join(found.status());
    if (Status status = make_room_for_descriptors(descriptor_count(found.value())); !status.ok())
      return client_->fail_to_join(status);
    return client_->link(std::move(found.value()), [&] {
      if (!still_wanted()) client_->abort("the job forms another generation", true);
      return keep_waiting();
    });
  }

  bool still_wanted() const {
    if (given_.on_failure == OnFailure::abort) return true;
    // A member may have ended since the generation was formed, before it has connected to anybody who would notice.
    admit_newcomers(*store_, given_.job, membership_->generation, given_.rank);
    return stands(*store_, given_.job, *membership_);
  }

  Cluster cluster() const {
    Cluster cluster;
    cluster.worker_count = options_.world_size;
    cluster.placement = options_.servers.empty() ? Placement::colocated : Placement::dedicated;
    cluster.server_count = options_.servers.empty() ? options_.world_size : static_cast<int>(options_.servers.size());
    if (!reduces_by_host()) return cluster;
    auto numbers = number_hosts(names_of(&Member::host_id), names_of(&Member::rack));
    cluster.hosts = std::move(numbers.hosts);
    cluster.racks = std::move(numbers.racks);
    return cluster;
  }

  std::vector<std::string> names_of(std::string Member::*name) const {
    std::vector<std::string> names;
    for (const Member& member : membership_->members) names.push_back(member.*name);
    return names;
  }

  /// Whether workers of a machine add up among themselves. They do so only where no other option excludes it.
  bool reduces_by_host() const {
    if (!membership_ || !options_.reduce_by_host) return false;
    FeatureSet features(options_);
    features.add(Feature::sums_of_machines);
    return features.check().ok();
  }

  /// Starts the embedded server, unless there are dedicated ones. Its cores take the interfaces in turn.
  Status open_server(const std::vector<std::string>& hosts, const std::shared_ptr<Loop>& client_loop, Member& mine) {
    if (!given_.servers.empty()) return {};
    std::vector<std::shared_ptr<Loop>> loops;
    if (given_.server_cores == 0 && given_.interfaces.size() <= 1) loops.push_back(client_loop);
    parts_->set_server(std::make_unique<ServerImpl>(given_, std::move(loops)));
    ServerImpl* server = parts_->server();
    std::vector<std::string> addresses;
    for (std::size_t core = 0; core < server->core_count(); ++core)
      addresses.push_back(host_and_port(hosts[core % hosts.size()], 0));
    mine.server_addresses.resize(server->core_count());
    for (const auto& network : transports_->networks) {
      if (Status status = server->listen(*network, addresses); !status.ok()) return status;
      for (std::size_t core = 0; core < server->core_count(); ++core)
        append(mine.server_addresses[core], server->last_addresses()[core]);
    }
    if (transports_->shm) {
      if (Status status = server->listen(*transports_->shm, ":0"); !status.ok()) return status;
      mine.server_shm_addresses = server->last_addresses();
    }
    if (Status status = server->listen(parts_->inproc(), kOwnServer); !status.ok()) return status;
    own_addresses_ = server->last_addresses();
    return {};
  }

  Status listen_for_peers(Lobby& lobby, const std::string& host, Member& mine) const {
    for (const auto& network : transports_->of_client()) {
      auto address = lobby.listen(*network, host_and_port(host, 0));
      if (!address.ok()) return address.status();
      append(mine.peer_address, address.value());
    }
    if (!transports_->shm) return {};
    auto address = lobby.listen(*transports_->shm, ":0");
    if (!address.ok()) return address.status();
    mine.peer_shm_address = address.value();
    return {};
  }

  /// Whether this process reaches a member through shared memory.
  Result<bool> shares_memory(int rank) const {
    const Member& other = membership_->members[static_cast<std::size_t>(rank)];
    const bool near = other.host_id == membership_->members[static_cast<std::size_t>(options_.rank)].host_id;
    if (transports_->shm && near && !other.peer_shm_address.empty()) return true;
    if (options_.transport != Medium::shm || rank == options_.rank) return false;
    return Status(ErrorCode::unreachable, concat("transport=shm, but rank ", rank, " shares no memory with rank ",
                                                 options_.rank, "; use transport=auto"));
  }

  /// What the members together rule out. Every rank finds the same, before it connects to another.
  Status check_members() const {
    FeatureSet features(options_);
    const auto& members = membership_->members;
    for (const Member& member : members)
      if (member.host_id != members.front().host_id) features.add(Feature::several_machines);
    Status status = features.check();
    if (!status.ok()) wait_until_all_know();
    return status;
  }

  /// Rank 0, which may serve the store, leaves when the others have seen there what it has seen, or do not come.
  void wait_until_all_know() const {
    const auto key = [this](int rank) {
      return concat("poseidon/", options_.job, "/ruled_out/", options_.generation, "/", rank);
    };
    if (options_.rank != 0) return static_cast<void>(store_->set(key(options_.rank), "yes"));
    for (int rank = 1; rank < options_.world_size; ++rank)
      if (!store_->get(key(rank), options_.timeout / 10).ok()) return;
  }

  Result<Endpoints> endpoints() const {
    if (Status status = check_members(); !status.ok()) return status;
    Endpoints endpoints;
    endpoints.run = membership_->run;
    Endpoints::Transports networks;
    for (const auto& network : transports_->of_client()) networks.push_back(network.get());
    for (const auto& address : options_.servers) endpoints.servers.push_back({networks, {address}, true, false, ""});
    for (int rank = 0; rank < options_.world_size; ++rank) {
      const Member& member = membership_->members[static_cast<std::size_t>(rank)];
      auto shm = shares_memory(rank);
      if (!shm.ok()) return shm.status();
      const auto transports = shm.value() ? Endpoints::Transports{transports_->shm.get()} : networks;
      endpoints.peers.push_back(
          {transports, shm.value() ? member.peer_shm_address : member.peer_address, member.host_name});
      if (!options_.servers.empty()) continue;
      if (rank == options_.rank)
        endpoints.servers.push_back({{&parts_->inproc()}, own_addresses_, false, true, member.host_name});
      else
        endpoints.servers.push_back({transports, shm.value() ? member.server_shm_addresses : member.server_addresses,
                                     false, false, member.host_name});
    }
    return endpoints;
  }

  /// The number of descriptors that the connections need if all others are on this host and have as many cores.
  std::size_t most_descriptors() const {
    const auto classes = static_cast<std::size_t>(given_.priority_classes);
    const auto cores =
        given_.servers.empty()
            ? std::max<std::size_t>({1, static_cast<std::size_t>(given_.server_cores), given_.interfaces.size()})
            : 0;
    const std::size_t of_servers = classes * static_cast<std::size_t>(given_.flows) * given_.servers.size();
    return of_servers + static_cast<std::size_t>(given_.world_size - 1) * (transports_->shm ? kShmFlowDescriptors : 1) *
                            classes * (1 + 2 * cores * static_cast<std::size_t>(given_.flows));
  }

  /// The least number of descriptors that the connections need. The further cores of dedicated servers are not known
  /// yet.
  std::size_t descriptor_count(const Endpoints& endpoints) const {
    const auto classes = static_cast<std::size_t>(options_.priority_classes);
    const std::size_t lanes = classes * static_cast<std::size_t>(options_.flows);
    std::size_t count = 0;
    for (std::size_t rank = 0; rank < endpoints.peers.size(); ++rank) {
      if (rank == static_cast<std::size_t>(options_.rank)) continue;
      const bool shares = endpoints.peers[rank].transports.front() == transports_->shm.get();
      const std::size_t each = shares ? kShmFlowDescriptors : 1;
      count += each * classes;
      if (parts_->server() == nullptr) continue;
      count += each * lanes * (endpoints.servers[rank].addresses.size() + parts_->server()->core_count());
    }
    return count + (parts_->server() != nullptr ? 0 : lanes * endpoints.servers.size());
  }

  const Options given_;  // without the secret
  const bool has_secret_;
  Options options_;  // `given_`, with rank, world size and generation of the membership
  std::shared_ptr<Store> store_;
  const std::shared_ptr<const WorkerTransports> transports_;
  std::optional<Membership> membership_;
  std::vector<std::string> own_addresses_;  // of the embedded server's cores, in this process
  std::unique_ptr<ClientImpl> client_;
  GenerationParts* parts_ = nullptr;  // of the last try; the client owns them
};

}  // namespace

Result<std::unique_ptr<Client>> join_job(const Options& options, std::shared_ptr<Store> store,
                                         const std::function<bool()>& keep_waiting, WorkerTransports transports) {
  return JobJoin(options, std::move(store), std::move(transports)).connect(keep_waiting);
}

}  // namespace poseidon
