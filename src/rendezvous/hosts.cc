#include "rendezvous/hosts.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <utility>

#include "base/file_descriptor.h"
#include "base/host.h"

namespace poseidon {

namespace {

std::string host_text(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

/// The IPv4 address of a device, otherwise its IPv6 address. Empty if it has none.
std::string device_host(const std::string& device) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string host;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = all; entry != nullptr && host.empty(); entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family || device != entry->ifa_name) continue;
      host = host_text(entry->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  ::freeifaddrs(all);
  return host;
}

Result<std::string> host_of_interface(const std::string& interface) {
  if (auto host = device_host(interface); !host.empty()) return host;
  in6_addr parsed{};
  if (::inet_pton(AF_INET, interface.c_str(), &parsed) == 1 || ::inet_pton(AF_INET6, interface.c_str(), &parsed) == 1)
    return interface;
  return Status(ErrorCode::unreachable, concat("interface '", interface,
                                               "' is neither an address nor a network device of this host that has "
                                               "one; choose one that `ip address` shows"));
}

/// The address that leads to master_addr.
Result<std::string> host_towards_master(const Options& options) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(options.master_addr.c_str(), "9", &hints, &found); error != 0)
    return Status(ErrorCode::unreachable, "MASTER_ADDR '" + options.master_addr + "' does not resolve: " +
                                              gai_strerror(error) + "; set it to rank 0's host name or address");
  // Connecting a datagram socket sends nothing. It makes the kernel choose the interface.
  const FileDescriptor probe(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  const bool chosen = ::connect(probe.get(), found->ai_addr, found->ai_addrlen) == 0 &&
                      ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0;
  ::freeaddrinfo(found);
  if (!chosen)
    return Status(ErrorCode::unreachable, "no interface of this host leads to MASTER_ADDR '" + options.master_addr +
                                              "': " + errno_text(errno) +
                                              "; check its routes, or name one (interfaces)");
  return host_text(reinterpret_cast<const sockaddr*>(&local), length);
}

}  // namespace

Result<std::vector<std::string>> listen_hosts(const Options& options) {
  std::vector<std::string> hosts;
  for (const std::string& interface : options.interfaces) {
    auto host = host_of_interface(interface);
    if (!host.ok()) return host.status();
    hosts.push_back(std::move(host.value()));
  }
  if (!hosts.empty()) return hosts;
  auto host = host_towards_master(options);
  if (!host.ok()) return host.status();
  return std::vector{std::move(host.value())};
}

std::string host_id() {
  std::error_code ignored;  // without /proc, only a different boot_id shows that processes are on different hosts
  const auto network = std::filesystem::read_symlink("/proc/self/ns/net", ignored);
  // A user of another user namespace is a stranger, who may share no memory, even with the same number.
  const auto users = std::filesystem::read_symlink("/proc/self/ns/user", ignored);
  return concat(boot_id(), " ", network.string(), " ", users.string(), " ", ::getuid());
}

}  // namespace poseidon
