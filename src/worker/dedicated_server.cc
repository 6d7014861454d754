// Server::listen: a parameter server in a process of its own.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/flight_record.h"
#include "base/host.h"
#include "base/wipe.h"
#include "poseidon/machine.h"
#include "poseidon/server.h"
#include "rendezvous/hosts.h"
#include "server/server_impl.h"
#include "transport/admission.h"
#include "worker/transports.h"

namespace poseidon {

namespace {

/// Returns half of the memory that this process may use: the machine's, or its container's if that is less.
std::size_t default_server_memory() {
  const auto memory_bytes =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::getpagesize());
  return std::min(memory_bytes, container_memory_bytes().value_or(memory_bytes)) / 2;
}

}  // namespace

Result<std::unique_ptr<Server>> Server::listen(const Options& options, std::uint16_t port) {
  Options any_job = options;
  any_job.world_size = 0;
  if (any_job.server_memory == 0) any_job.server_memory = default_server_memory();
  if (!any_job.flight_record.empty()) {
    if (const Status usable = open_record_directory(any_job.flight_record); !usable.ok())
      return usable.with_context("flight_record");
  }
  if (Status status = check_transport(options); !status.ok()) return status;
  const auto admission = admission_of(options);
  if (!admission.ok()) return admission.status();
  wipe(any_job.secret);
  // A dedicated server has no master_addr that would tell the interface. It opens ports to other hosts only on request.
  std::vector<std::string> hosts{"127.0.0.1"};
  if (!options.interfaces.empty()) {
    auto found = listen_hosts(options);
    if (!found.ok()) return found.status();
    hosts = std::move(found.value());
  }
  auto server = std::make_unique<ServerImpl>(any_job);
  server->name_secrets(admission.value().credentials.names());
  if (port != 0 && port + server->core_count() - 1 > UINT16_MAX)
    return Status(ErrorCode::invalid_argument,
                  concat("a server of ", server->core_count(), " cores takes as many ports from ", port,
                         " on, which is past 65535; choose a lower port"));
  std::vector<std::string> addresses;
  for (std::size_t core = 0; core < server->core_count(); ++core) {
    const std::size_t own_port = port == 0 ? 0 : port + core;
    addresses.push_back(host_and_port(hosts[core % hosts.size()], static_cast<unsigned int>(own_port)));
  }
  if (Status status = server->listen(make_server_transport(options, admission.value()), addresses); !status.ok()) {
    if (status.code() != ErrorCode::unreachable || port == 0 || server->core_count() == 1) return status;
    return Status(status.code(), concat(status.message(), "; a server of ", server->core_count(),
                                        " cores takes all ports from ", port, " to ", port + server->core_count() - 1));
  }
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace poseidon
