// goodbye: the process at the other end leaves on purpose.
#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::goodbye(ClientImpl& client, LinkState& link, const wire::Header& /*header*/,
                                     std::span<const std::byte> /*payload*/) {
  client.fail_if(client.departures_.said_goodbye(link));
  return {};
}

}  // namespace poseidon
