#include "transport/tcp/congestion_control.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace poseidon::tcp {

namespace {

constexpr std::uint32_t kLongRoundTripUs = 10'000;
constexpr std::size_t kNameBytes = 16;  // the kernel's TCP_CA_NAME_MAX

}  // namespace

void replace_bbr(int socket) {
  std::array<char, kNameBytes + 1> name{};
  socklen_t size = kNameBytes;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return;
  if (!std::string_view(name.data()).starts_with("bbr")) return;
  tcp_info info{};
  size = sizeof info;
  const bool known = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  if (known && info.tcpi_rtt >= kLongRoundTripUs) return;
  // CUBIC reaches 0.483 of no exchange where Reno reaches 0.749 (ResNet-50 with overlap, 31.25 Mb/s, queues of 60 ms).
  constexpr std::string_view reno = "reno";
  static_cast<void>(::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, reno.data(), reno.size()));
}

}  // namespace poseidon::tcp
