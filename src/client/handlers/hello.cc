// hello: a server or peer says who it is.
#include "wire/messages/hello.h"

#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::hello(ClientImpl& client, LinkState& link, const wire::Header& header,
                                   std::span<const std::byte> payload) {
  if (Status status = client.connections_.on_hello(link, wire::Hello::read(header, payload)); !status.ok())
    return status;
  client.greeted();
  return {};
}

}  // namespace poseidon
