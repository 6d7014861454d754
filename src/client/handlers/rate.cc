// rate: how fast this worker may send to the server.
#include "client/client_impl.h"
#include "wire/messages/sending.h"

namespace poseidon {

Status ClientImpl::Handlers::rate(ClientImpl& /*client*/, LinkState& link, const wire::Header& header,
                                  std::span<const std::byte> /*payload*/) {
  link.limited = true;
  link.flow->limit_rate(wire::Rate::read(header).bytes_per_second);
  return {};
}

}  // namespace poseidon
