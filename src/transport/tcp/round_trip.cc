#include "transport/tcp/round_trip.h"

#include <cstdint>

#include "transport/tcp/kernel_info.h"

namespace poseidon::tcp {

namespace {

constexpr std::uint32_t kLongRoundTripUs = 10'000;

}  // namespace

bool has_long_round_trip(int socket) { return kernel_info(socket).tcpi_rtt >= kLongRoundTripUs; }

}  // namespace poseidon::tcp
