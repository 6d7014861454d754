#include "transport/tcp/retransmission.h"

#include <netinet/in.h>

#include "transport/tcp/round_trip.h"
#include "transport/tcp/socket_option.h"

namespace poseidon::tcp {

namespace {

// The headers of older systems lack these names.
constexpr int kLeastTimeoutOption = 45;     // TCP_RTO_MIN_US
constexpr int kAcknowledgementOption = 46;  // TCP_DELACK_MAX_US

constexpr int kLeastTimeoutUs = 20'000;
// Below the timeout of the other end, so that no packet is sent again that has only not been acknowledged yet. A peer
// with an older kernel takes up to 40 ms, and some of its packets are sent twice.
constexpr int kAcknowledgementUs = 5'000;

}  // namespace

void shorten_timeout(int socket) {
  if (has_long_round_trip(socket)) return;
  // A kernel that lacks them has its timeout of 200 ms.
  if (try_option(socket, IPPROTO_TCP, kAcknowledgementOption, kAcknowledgementUs))
    set_option(socket, IPPROTO_TCP, kLeastTimeoutOption, kLeastTimeoutUs);
}

}  // namespace poseidon::tcp
