// TCP transport: nonblocking sockets under epoll, vectored sends, receives straight into place.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace poseidon {

/// Addresses are "host:port" (IPv6 in brackets); port 0 binds any free one.
std::unique_ptr<Transport> make_tcp_transport();

}  // namespace poseidon
