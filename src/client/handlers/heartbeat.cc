// heartbeat: the peer's process runs. ClientImpl::accept has noted the sign of life.
#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::heartbeat(ClientImpl& /*client*/, LinkState& /*link*/, const wire::Header& /*header*/,
                                       std::span<const std::byte> /*payload*/) {
  return {};
}

}  // namespace poseidon
