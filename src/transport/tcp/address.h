// Addresses of the TCP transport: text to socket address and back.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/file_descriptor.h"
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

/// Whose address it is, as far as one can tell: the IPv4 host, or the IPv6 network of 64 bits, where a host has as many
/// addresses as it likes. For comparison only.
std::string source_of(const SocketAddress& address);

/// A nonblocking socket that listens there, on a port that another process may just have left. Invalid, with errno set,
/// on failure.
FileDescriptor bind_and_listen(const SocketAddress& address);

/// Whether a connection to a free port of this machine has met itself (TCP's simultaneous open).
bool connected_to_itself(int fd);

}  // namespace poseidon::tcp
