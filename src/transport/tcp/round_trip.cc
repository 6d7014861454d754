#include "transport/tcp/round_trip.h"

#include <linux/tcp.h>  // the C library's own header does not know tcpi_min_rtt
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

namespace poseidon::tcp {

namespace {

constexpr std::uint32_t kLongRoundTripUs = 10'000;
constexpr std::uint32_t kNoRoundTrip = ~0u;  // the kernel's value before the first one

/// All zero if it is not known. Older kernels fill in the first fields only.
tcp_info info_of(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return info;
}

}  // namespace

bool has_long_round_trip(int socket) { return info_of(socket).tcpi_rtt >= kLongRoundTripUs; }

std::chrono::microseconds least_round_trip(int socket) {
  const std::uint32_t microseconds = info_of(socket).tcpi_min_rtt;
  return std::chrono::microseconds(microseconds == kNoRoundTrip ? 0 : microseconds);
}

}  // namespace poseidon::tcp
