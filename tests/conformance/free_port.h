// Ports that tests, which run as several processes at once, do not take from each other.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

#include "base/file_descriptor.h"

namespace poseidon::testing {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Others may bind the socket's port, too, as long as nobody listens on it.
inline void reuse_address(int socket) {
  const int on = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

/// Binds the socket to a port of `free_port` on loopback. Returns whether it could.
inline bool bind_reserved(int socket, std::uint16_t port) {
  reuse_address(socket);
  const sockaddr_in address = loopback(port);
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

/// Returns a port that nobody listens on. It is outside the range that the kernel uses for outgoing connections, and
/// outside that of `poseidon.launch.free_port`. No other process that asks in this way gets it before this one has
/// asked for many more.
inline std::uint16_t free_port() {
  constexpr unsigned kFirst = 30'000;
  constexpr unsigned kCount = 2'768;
  constexpr std::size_t kReserved = 64;
  static std::mutex mutex;
  static std::deque<FileDescriptor> reserved;
  static unsigned next = static_cast<unsigned>(::getpid()) * (kCount / 4);  // tests run as four processes
  const std::lock_guard lock(mutex);
  for (;;) {
    const auto port = static_cast<std::uint16_t>(kFirst + next++ % kCount);
    FileDescriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = loopback(port);
    if (::bind(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    // While it stays bound, only who reuses addresses can bind the port.
    reuse_address(probe.get());
    reserved.push_back(std::move(probe));
    if (reserved.size() > kReserved) reserved.pop_front();
    return port;
  }
}

}  // namespace poseidon::testing
