// Measures the CPU time that the library needs on this machine, and tells what the kernel knows of its connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace poseidon {

/// The seconds that it takes to choose flow and order for `chunk_count` chunks that all wait at once. For each chunk,
/// its layer's priority is looked up, and the chunk is put into the send queue of its class and taken out again. The
/// chunks are spread over `layer_count` layers, whose urgencies fall from 1 to 0. They come in the order of backward,
/// the least urgent first (Geryon Figure 10). Any thread.
double scheduling_seconds(std::size_t chunk_count, std::size_t layer_count);

/// How many multiply-adds one thread makes per second when it multiplies float32 factors (the scheme sfb). It takes a
/// few milliseconds. Any thread.
double multiply_adds_per_second();

/// What the kernel knows of a TCP connection (its struct tcp_info).
struct Connection {
  std::uint64_t id = 0;     // that no other open socket of this machine has
  std::string own_address;  // without a port, as is the next
  std::string peer_address;
  std::uint64_t acknowledged_bytes = 0;
  std::uint64_t busy_us = 0;  // how long some bytes were not acknowledged yet
  std::uint32_t round_trip_us = 0;
  std::uint32_t resent_packets = 0;
};

/// The TCP connections that this library has in this process. It asks for no other library's. Any thread.
std::vector<Connection> connections();

}  // namespace poseidon
