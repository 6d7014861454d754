// This process's TCP connections, as the kernel sees them.
#pragma once

#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "transport/tcp/address.h"

namespace poseidon::testing {

struct OwnSocket {
  std::string local_address;
  std::string peer_address;
  int dscp = 0;
  int priority = 0;              // SO_PRIORITY
  std::uint64_t bytes_sent = 0;  // each byte once, however often it was sent
  std::string congestion_control;
};

namespace own_sockets_detail {

inline int option(int fd, int level, int name) {
  int value = 0;
  socklen_t size = sizeof value;
  return ::getsockopt(fd, level, name, &value, &size) == 0 ? value : -1;
}

inline std::string congestion_control_of(int fd) {
  std::array<char, 17> name{};
  socklen_t size = 16;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) == 0 ? name.data() : "";
}

}  // namespace own_sockets_detail

/// The kernel drops all that comes for this socket, and acknowledges nothing, as if the machine were down.
inline bool cut_off(int fd) {
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{1, &drop};
  return ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

/// Cuts off all connected ends that are in this process. Returns their number.
inline int cut_off_own_sockets() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    const auto family = tcp::peer_address(fd).family();
    if ((family == AF_INET || family == AF_INET6) && cut_off(fd)) ++count;
  }
  return count;
}

/// Returns one entry for each end that is in this process.
inline std::vector<OwnSocket> own_sockets() {
  using own_sockets_detail::option;
  std::vector<OwnSocket> sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    const auto peer = tcp::peer_address(fd);
    const bool v6 = peer.family() == AF_INET6;
    tcp_info info{};
    socklen_t size = sizeof info;
    if ((!v6 && peer.family() != AF_INET) || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    const int traffic_class = v6 ? option(fd, IPPROTO_IPV6, IPV6_TCLASS) : option(fd, IPPROTO_IP, IP_TOS);
    sockets.push_back({tcp::to_text(tcp::local_address(fd)), tcp::to_text(peer), traffic_class >> 2,
                       option(fd, SOL_SOCKET, SO_PRIORITY), info.tcpi_bytes_sent - info.tcpi_bytes_retrans,
                       own_sockets_detail::congestion_control_of(fd)});
  }
  return sockets;
}

}  // namespace poseidon::testing
