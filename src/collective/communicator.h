// Communicator: the ranks that make collective calls together, as their client's loop knows them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/hosts.h"
#include "transport/transport.h"

namespace poseidon {

/// The rest of this room, and its messages, know ranks by their places in the communicator. Connections know the
/// client's.
struct Communicator {
  std::uint32_t id = 0;
  std::uint32_t rank = 0;            // of this process
  std::vector<std::uint32_t> ranks;  // the client's, by this communicator's
  Hosts hosts;                       // of its ranks
  std::uint64_t calls = 0;           // collectives that this rank has begun

  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks.size()); }
};

/// Whether a message has to wait until its receiver has said that it is ready for it. Less than this comes unasked: the
/// receiver keeps it until its own call.
inline constexpr std::size_t kUnaskedBytes = std::size_t{64} << 10;

/// The most bytes that a rank keeps for calls of its own which come later. Whoever is further ahead ends the job, with
/// a message that says so.
inline constexpr std::size_t kMostUnaskedBytes = std::size_t{1} << 30;

}  // namespace poseidon
