// TrafficStats: what went over the network.
#pragma once

#include <cstdint>

namespace poseidon {

/// Bytes that were sent and received over the network, headers included. Bytes that stay inside a process do not count.
struct TrafficStats {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  // What these would be if nothing had been coded (Options::coding).
  std::uint64_t plain_bytes_sent = 0;
  std::uint64_t plain_bytes_received = 0;

  TrafficStats& operator+=(const TrafficStats& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    plain_bytes_sent += other.plain_bytes_sent;
    plain_bytes_received += other.plain_bytes_received;
    return *this;
  }
  bool operator==(const TrafficStats&) const = default;
};

}  // namespace poseidon
