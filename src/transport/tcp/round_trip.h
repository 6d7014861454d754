// How far away the peer of a connection is.
#pragma once

#include <chrono>

namespace poseidon::tcp {

/// Whether a connected socket's round trip takes 10 ms and more, as it does between sites. False if it is not known.
bool has_long_round_trip(int socket);
/// The shortest round trip of a connected socket in the last minutes. 0 if it is not known.
std::chrono::microseconds least_round_trip(int socket);

}  // namespace poseidon::tcp
