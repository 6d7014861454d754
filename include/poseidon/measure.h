// Measures the CPU time that the library needs on this machine.
#pragma once

#include <cstddef>

namespace poseidon {

/// The seconds that it takes to choose flow and order for `chunk_count` chunks that all wait at once. For each chunk,
/// its layer's priority is looked up, and the chunk is put into the send queue of its class and taken out again. The
/// chunks are spread over `layer_count` layers, whose urgencies fall from 1 to 0. They come in the order of backward,
/// the least urgent first (Geryon Figure 10). Any thread.
double scheduling_seconds(std::size_t chunk_count, std::size_t layer_count);

/// How many multiply-adds one thread makes per second when it multiplies float32 factors (the scheme sfb). It takes a
/// few milliseconds. Any thread.
double multiply_adds_per_second();

}  // namespace poseidon
