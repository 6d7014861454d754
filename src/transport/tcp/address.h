// Addresses of the TCP transport: text to socket address and back.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "poseidon/status.h"

namespace poseidon::tcp {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size_bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

/// "host:port" or "[v6]:port" to one or more socket addresses. Blocks when the host is a name that
/// has to be looked up. invalid_argument for text of another form, unreachable for an unknown name.
Result<std::vector<SocketAddress>> resolve(const std::string& address);

/// "10.1.0.3:41234" or "[::1]:41234".
std::string to_text(const SocketAddress& address);

/// Of a bound or connected socket.
SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

}  // namespace poseidon::tcp
