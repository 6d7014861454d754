// What the kernel knows of a TCP connection.
#pragma once

#include <linux/tcp.h>  // the C library's own header does not know tcpi_min_rtt
#include <netinet/in.h>
#include <sys/socket.h>

namespace poseidon::tcp {

/// What the kernel is too old to know is 0.
inline tcp_info kernel_info(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return info;
}

}  // namespace poseidon::tcp
