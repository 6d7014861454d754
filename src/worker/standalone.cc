// Server::listen: a parameter server in a process of its own.
#include <string>
#include <utility>

#include "poseidon/server.h"
#include "rendezvous/members.h"
#include "server/server_impl.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {

Result<std::unique_ptr<Server>> Server::listen(const Options& options, std::uint16_t port) {
  Options any_job = options;
  any_job.world_size = 0;
  // Without an interface there is no master_addr to go by: workers of any network may come.
  std::string host = "0.0.0.0";
  if (!options.interface.empty()) {
    auto found = listen_host(options);
    if (!found.ok()) return found.status();
    host = std::move(found.value());
  }
  auto server = std::make_unique<ServerImpl>(any_job);
  if (Status status = server->listen(make_tcp_transport(), host + ":" + std::to_string(port)); !status.ok())
    return status;
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace poseidon
