#include "transport/tcp/round_trip.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdint>

namespace poseidon::tcp {

namespace {

constexpr std::uint32_t kLongRoundTripUs = 10'000;

}  // namespace

bool has_long_round_trip(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_rtt >= kLongRoundTripUs;
}

}  // namespace poseidon::tcp
