#include "transport/tcp/retransmission.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>

#include "transport/tcp/round_trip.h"

namespace poseidon::tcp {

namespace {

// The headers of older systems lack these names.
constexpr int kLeastTimeoutUs = 45;     // TCP_RTO_MIN_US
constexpr int kAcknowledgementUs = 46;  // TCP_DELACK_MAX_US

constexpr std::chrono::microseconds kLeastTimeout{20'000};
// Below the timeout of the other end, so that no packet is sent again that has only not been acknowledged yet. A peer
// with an older kernel takes up to 40 ms, and some of its packets are sent twice.
constexpr std::chrono::microseconds kAcknowledgement{5'000};

bool set(int socket, int option, std::chrono::microseconds value) {
  const auto number = static_cast<int>(value.count());
  return ::setsockopt(socket, IPPROTO_TCP, option, &number, sizeof number) == 0;
}

}  // namespace

void shorten_timeout(int socket) {
  if (has_long_round_trip(socket)) return;
  // A kernel that lacks them has its timeout of 200 ms.
  if (set(socket, kAcknowledgementUs, kAcknowledgement)) static_cast<void>(set(socket, kLeastTimeoutUs, kLeastTimeout));
}

}  // namespace poseidon::tcp
