// What a server grants at most, whoever asks (docs/errors.md, "Limits"). What takes memory has a limit in bytes as
// well: Options::memory_limit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace poseidon::limits {

inline constexpr std::uint32_t kWorkers = 1u << 16;  // of a job
// Of a rank to one core: as many as the most flows and priority classes make.
inline constexpr std::size_t kConnectionsPerRank = 128;
inline constexpr std::size_t kChunks = 1u << 22;  // of a job on one core
// The same: units with a rule; of each worker, where each has its own (consistency=ssp, async).
inline constexpr std::size_t kRules = 1u << 20;

// Connections to one core that have not said hello: when one more comes the oldest goes.
inline constexpr std::size_t kPendingConnections = 256;
inline constexpr std::chrono::seconds kHelloPatience{5};

// Of one connection, as long as they have not left; further ones are not told.
inline constexpr std::size_t kUnsentRefusals = 64;
// What a message that has not left costs its job beside its payload; counted by so many at a time.
inline constexpr std::size_t kMessageBytes = 256;
inline constexpr std::size_t kMessagesCounted = 64;
// What an entry of a table costs its job beside itself, allocation and links: an estimate.
inline constexpr std::size_t kNodeBytes = 64;

// Runs of a job that are remembered when another one has taken their place.
inline constexpr std::size_t kEarlierRuns = 16;

// What a server tells its owner of late ranks, and what of checkpoints; further ones are not told.
inline constexpr std::size_t kNotices = 64;

}  // namespace poseidon::limits
