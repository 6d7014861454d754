// Which congestion control a connection has.
#pragma once

namespace poseidon::tcp {

/// Replaces BBR by Reno, which every process may choose. BBR estimates a flow's share of the port from what the
/// flow has sent. Many flows that start, pause and wait for each other keep it wrong, and their sum leaves the port
/// idle (docs/decisions/0030-congestion-control.md). Connections with a round trip of 10 ms and more keep the system's
/// choice, and so does every other congestion control. `socket` must be connected.
void replace_bbr(int socket);

}  // namespace poseidon::tcp
