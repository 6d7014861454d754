// Which congestion control a connection has.
#pragma once

namespace poseidon::tcp {

// BBR is replaced by Reno, which every process may choose. BBR estimates a flow's share of the port from what the flow
// has sent. Many flows that start, pause and wait for each other keep it wrong, and their sum leaves the port idle
// (docs/decisions/0030-congestion-control.md). Connections with a round trip of 10 ms and more keep the system's
// choice, and so does every other congestion control.

/// Call it before a socket connects or listens, so that BBR never starts. Once started, it leaves its pacing behind:
/// VGG19 with overlap and queues of 64 KB reaches 0.879 of no exchange then, and 0.981 otherwise.
void avoid_bbr(int socket);

/// Call it on a connected socket, whose round trip is known. It replaces a BBR that came by another way, such as a
/// route, and takes back avoid_bbr() where the round trip is long.
void settle_congestion_control(int socket);

}  // namespace poseidon::tcp
