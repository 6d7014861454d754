// waiting: what a peer has waited for since a while. It is shown if this job ends because of it.
#include "client/client_impl.h"
#include "wire/messages/life.h"

namespace poseidon {

Status ClientImpl::Handlers::waiting(ClientImpl& client, LinkState& link, const wire::Header& /*header*/,
                                     std::span<const std::byte> payload) {
  client.heartbeats_.note_wait(link.index, wire::Waiting::read(payload).text);
  return {};
}

}  // namespace poseidon
