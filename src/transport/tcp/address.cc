#include "transport/tcp/address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

#include "transport/tcp/socket_option.h"

namespace poseidon::tcp {

namespace {

struct HostPort {
  std::string host;
  std::string port;
};

std::optional<HostPort> split(std::string_view address) {
  const auto colon = address.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = address.substr(0, colon);
  const std::string_view port = address.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return std::nullopt;  // an IPv6 address without brackets: nothing separates its last part from the port
  }
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || error != std::errc() || end != port.data() + port.size()) return std::nullopt;
  return HostPort{std::string(host), std::string(port)};
}

SocketAddress address_from(int (*ask)(int, sockaddr*, socklen_t*), int fd) {
  SocketAddress address;
  address.size_bytes = sizeof(address.storage);
  if (ask(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size_bytes) != 0) return {};
  return address;
}

/// Whether the socket is connected to itself. TCP's simultaneous open does that when one connects to a free port of
/// this machine.
bool connected_to_itself(int fd) {
  const SocketAddress ours = local_address(fd);
  const SocketAddress theirs = peer_address(fd);
  return ours.size_bytes == theirs.size_bytes && std::memcmp(&ours.storage, &theirs.storage, ours.size_bytes) == 0;
}

}  // namespace

Result<std::vector<SocketAddress>> resolve(const std::string& address) {
  const auto parts = split(address);
  if (!parts) {
    return Status(ErrorCode::invalid_argument,
                  "address \"" + address + "\" must be of the form host:port (an IPv6 host in brackets)");
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* head = nullptr;
  const int error = ::getaddrinfo(parts->host.c_str(), parts->port.c_str(), &hints, &head);
  if (error != 0) {
    return Status(ErrorCode::unreachable, "cannot look up the host of \"" + address +
                                              "\": " + std::string(::gai_strerror(error)) + "; check its name");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(head, &::freeaddrinfo);
  std::vector<SocketAddress> found;
  for (const addrinfo* entry = head; entry != nullptr; entry = entry->ai_next) {
    SocketAddress one;
    one.size_bytes = std::min<socklen_t>(entry->ai_addrlen, sizeof(one.storage));
    std::memcpy(&one.storage, entry->ai_addr, one.size_bytes);
    found.push_back(one);
  }
  return found;
}

bool is_loopback(const SocketAddress& address) {
  if (address.family() == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
  constexpr std::uint32_t kNetwork = 127;
  return ntohl(reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr) >> 24 == kNetwork;
}

SocketAddress any_address(const SocketAddress& address) {
  SocketAddress any = address;
  if (address.family() == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(any.storage).sin6_addr = in6addr_any;
  else
    reinterpret_cast<sockaddr_in&>(any.storage).sin_addr.s_addr = INADDR_ANY;
  return any;
}

std::string to_text(const SocketAddress& address) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(address.get(), address.size_bytes, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown address";
  }
  const std::string name = host.data();
  return (address.family() == AF_INET6 ? "[" + name + "]" : name) + ":" + port.data();
}

SocketAddress local_address(int fd) { return address_from(::getsockname, fd); }

SocketAddress peer_address(int fd) { return address_from(::getpeername, fd); }

bool leaves_machine(int fd) {
  const SocketAddress peer = peer_address(fd);
  return !is_loopback(peer) && source_of(peer) != source_of(local_address(fd));
}

std::string source_of(const SocketAddress& address) {
  constexpr std::size_t network_bytes = 8;
  if (address.family() == AF_INET) {
    const auto& ours = reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr;
    return {reinterpret_cast<const char*>(&ours), sizeof ours};
  }
  const auto& ours = reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr;
  // A socket for both protocols shows IPv4 hosts as addresses of one IPv6 network, so all bytes are compared.
  return {reinterpret_cast<const char*>(&ours), IN6_IS_ADDR_V4MAPPED(&ours) ? sizeof ours : network_bytes};
}

FileDescriptor bind_and_listen(const SocketAddress& address) {
  FileDescriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  if (try_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1) &&
      ::bind(socket.get(), address.get(), address.size_bytes) == 0 && ::listen(socket.get(), SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t size_bytes = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size_bytes) != 0) return errno;
  return error == 0 && connected_to_itself(fd) ? ECONNREFUSED : error;
}

}  // namespace poseidon::tcp
