// What the kernel knows of the connections of this process (include/poseidon/measure.h).
#include <linux/tcp.h>  // the C library's own header does not know all fields
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>

#include "base/file_descriptor.h"
#include "poseidon/measure.h"
#include "transport/tcp/address.h"

namespace poseidon {

namespace {

/// "10.1.0.3:41234" without the port, and "[::1]:41234" without brackets.
std::string host_of(const tcp::SocketAddress& address) {
  std::string text = tcp::to_text(address);
  text.erase(std::min(text.rfind(':'), text.size()));
  return text.starts_with('[') ? text.substr(1, text.size() - 2) : text;
}

bool is_ip(int family) { return family == AF_INET || family == AF_INET6; }

}  // namespace

std::vector<Connection> connections() {
  std::vector<Connection> found;
  for (const int fd : owned_descriptors()) {
    const tcp::SocketAddress peer = tcp::peer_address(fd);  // of what is no connection it has no family
    struct stat status {};
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (!is_ip(peer.family()) || ::fstat(fd, &status) != 0) continue;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    found.push_back({.id = status.st_ino,
                     .own_address = host_of(tcp::local_address(fd)),
                     .peer_address = host_of(peer),
                     .acknowledged_bytes = info.tcpi_bytes_acked,
                     .busy_us = info.tcpi_busy_time,
                     .round_trip_us = info.tcpi_rtt,
                     .resent_packets = info.tcpi_total_retrans});
  }
  return found;
}

}  // namespace poseidon
