// rate: how fast this worker may send to the server.
#include "wire/messages/rate.h"

#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::rate(ClientImpl& /*client*/, LinkState& link, const wire::Header& header,
                                  std::span<const std::byte> /*payload*/) {
  link.limited = true;
  link.flow->limit_rate(wire::Rate::read(header).bytes_per_second);
  return {};
}

}  // namespace poseidon
