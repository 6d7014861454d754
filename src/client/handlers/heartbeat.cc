// heartbeat: the other process runs. ClientImpl::accept has noted the sign of life.
#include "client/client_impl.h"
#include "wire/messages/life.h"

namespace poseidon {

Status ClientImpl::Handlers::heartbeat(ClientImpl& client, LinkState& link, const wire::Header& header,
                                       std::span<const std::byte> /*payload*/) {
  const std::uint32_t level = wire::Heartbeat::read(header).level;
  if (link.kind == LinkKind::peer) {
    client.heartbeats_.heard(link.index, level);
  } else {
    link.asked_ns = 0;
    link.idle = level == 0;
  }
  return {};
}

}  // namespace poseidon
