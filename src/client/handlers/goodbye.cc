// goodbye: the process at the other end closes on purpose.
#include "client/client_impl.h"

namespace poseidon {

Status ClientImpl::Handlers::goodbye(ClientImpl& /*client*/, LinkState& link, const wire::Header& /*header*/,
                                     std::span<const std::byte> /*payload*/) {
  link.left = true;
  return {};
}

}  // namespace poseidon
