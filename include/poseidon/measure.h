// What the library itself costs the host, measured where it runs.
#pragma once

#include <cstddef>

namespace poseidon {

/// Seconds that choosing flow and order of `chunk_count` chunks takes that all wait at once: for each its layer's
/// priority looked up, into the send queue of its class, and out again. The chunks are spread over `layer_count`
/// layers, whose urgencies fall from 1 to 0, and come in the order of backward, the least urgent first
/// (Geryon Figure 10). Any thread.
double scheduling_seconds(std::size_t chunk_count, std::size_t layer_count);

}  // namespace poseidon
