// Server::listen: a parameter server in a process of its own.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/server.h"
#include "rendezvous/members.h"
#include "server/server_impl.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon {

Result<std::unique_ptr<Server>> Server::listen(const Options& options, std::uint16_t port) {
  Options any_job = options;
  any_job.world_size = 0;
  // Without an interface there is no master_addr to go by: workers of any network may come.
  std::vector<std::string> hosts{"0.0.0.0"};
  if (!options.interfaces.empty()) {
    auto found = listen_hosts(options);
    if (!found.ok()) return found.status();
    hosts = std::move(found.value());
  }
  auto server = std::make_unique<ServerImpl>(any_job);
  if (port != 0 && port + server->core_count() - 1 > UINT16_MAX)
    return Status(ErrorCode::invalid_argument, "a server of " + std::to_string(server->core_count()) +
                                                   " cores takes as many ports from " + std::to_string(port) +
                                                   " on, which is past 65535");
  std::vector<std::string> addresses;
  for (std::size_t core = 0; core < server->core_count(); ++core) {
    const std::size_t own_port = port == 0 ? 0 : port + core;
    addresses.push_back(hosts[core % hosts.size()] + ":" + std::to_string(own_port));
  }
  auto transport = options.transport == Medium::ucx ? make_ucx_transport() : make_tcp_transport();
  if (!transport) return Status(ErrorCode::invalid_argument, kNoUcx);
  if (Status status = server->listen(std::move(transport), addresses); !status.ok()) return status;
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace poseidon
