// Addresses of the TCP transport: conversion between text and socket addresses.
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

/// Converts "host:port" or "[v6]:port" to one or more socket addresses. The call blocks if the host is a name that has
/// to be looked up. ErrorCode::invalid_argument: the text has another form. ErrorCode::unreachable: the name is
/// unknown.
Result<std::vector<SocketAddress>> resolve(const std::string& address);

/// Whether only processes of this machine can connect to the address.
bool is_loopback(const SocketAddress& address);

/// Returns what stands for all addresses of this machine, of the same family and with the same port.
SocketAddress any_address(const SocketAddress& address);

/// Returns text such as "10.1.0.3:41234" or "[::1]:41234".
std::string to_text(const SocketAddress& address);

/// Returns the address of a bound or connected socket.
SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

/// Whether the peer of a connected socket is on another machine, as far as addresses tell.
bool leaves_machine(int fd);

/// Returns what identifies the host behind the address, as far as one can tell: the IPv4 host, or the IPv6 network of
/// 64 bits, because an IPv6 host has as many addresses as it likes. Use the result for comparison only.
std::string source_of(const SocketAddress& address);

/// Returns a nonblocking socket that listens at the address. The port may be one that another process has just left. On
/// failure the result is invalid and errno is set.
FileDescriptor bind_and_listen(const SocketAddress& address);

/// Why a nonblocking connect() has failed, after the socket's event: an errno. 0: it has not, and the socket is not
/// connected to itself.
int connect_error(int fd);

}  // namespace poseidon::tcp
