// ready: a peer takes what this rank has for it of a collective, or of a message.
#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::ready(ClientImpl& client, LinkState& link, const wire::Header& header,
                                   std::span<const std::byte> /*payload*/) {
  if (header.rank != link.index) return {ErrorCode::mismatch, "sent a ready message for another rank"};
  return client.collectives_.on_ready(header);
}

}  // namespace poseidon
