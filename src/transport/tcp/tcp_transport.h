// TCP transport: nonblocking sockets with epoll and vectored sends. Payloads are received directly into their memory.
#pragma once

#include <memory>

#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// Addresses are "host:port" (IPv6 in brackets). Port 0 binds any free port. Both ends prove that they know the secret
/// before a flow exists. bytes_sent and bytes_received do not count the handshake.
std::unique_ptr<Transport> make_tcp_transport(const Admission& admission);
inline std::unique_ptr<Transport> make_tcp_transport() { return make_tcp_transport(Admission()); }

}  // namespace poseidon
