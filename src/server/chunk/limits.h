// The most that a server grants to anybody (docs/errors.md, "Limits"). What takes memory also has a limit in bytes:
// Options::memory_limit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace poseidon::limits {

inline constexpr std::uint32_t kWorkers = 1u << 16;  // workers of a job
// Connections of one rank to one core: as many as the largest numbers of flows and priority classes make.
inline constexpr std::size_t kConnectionsPerRank = 128;
inline constexpr std::size_t kChunks = 1u << 22;  // chunks of a job on one core
// Units with a rule, of a job on one core. If each worker has rules of its own (consistency=ssp, async), they are
// counted for each worker.
inline constexpr std::size_t kRules = 1u << 20;

// Pending connections to one core, which have not said hello. When one more comes, the oldest is closed.
inline constexpr std::size_t kPendingConnections = 256;
inline constexpr std::chrono::seconds kHelloPatience{5};

// Refusals of one connection that have not left yet. Further ones are not sent.
inline constexpr std::size_t kUnsentRefusals = 64;
// What a message that has not left costs its job beside its payload. The messages are counted in groups.
inline constexpr std::size_t kMessageBytes = 256;
inline constexpr std::size_t kMessagesCounted = 64;
// An estimate of what an entry of a table costs its job beside itself, for allocation and links.
inline constexpr std::size_t kNodeBytes = 64;

// How many runs of a job are remembered after another run has taken their place.
inline constexpr std::size_t kEarlierRuns = 16;

// How many evicted jobs are remembered.
inline constexpr std::size_t kRememberedJobs = 256;

// Notices about late ranks, and notices about checkpoints, that a server gives its owner. Further ones are not given.
inline constexpr std::size_t kNotices = 64;

}  // namespace poseidon::limits
