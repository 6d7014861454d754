// How far away the peer of a connection is.
#pragma once

namespace poseidon::tcp {

/// Whether a connected socket's round trip takes 10 ms and more, as it does between sites. False if it is not known.
bool has_long_round_trip(int socket);

}  // namespace poseidon::tcp
