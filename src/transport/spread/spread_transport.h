// Spread transport: the flows of another transport, whose bytes several loops move.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/transport.h"

namespace poseidon {

/// One loop moves the bytes of as many flows as one processor core can. Where the port is faster, the connections of a
/// worker are spread over `loop_count` loops in turn. Its own loop keeps the rest of the work. `beneath` must outlive
/// the transport. The transport must outlive its listeners and flows.
std::unique_ptr<Transport> make_spread_transport(Transport& beneath, std::size_t loop_count);

}  // namespace poseidon
