// Cutting units into chunks and spreading the chunks over the shards (Poseidon §4.1).
#pragma once

#include <algorithm>
#include <cstddef>

#include "poseidon/options.h"
#include "poseidon/plan.h"

namespace poseidon {

/// The smallest chunk into which a unit is spread. Below this size a message costs more than it gains.
inline constexpr std::size_t kMinChunkBytes = 16u << 10;
/// The size of every chunk but a unit's last is a multiple of this: a cache line, and whole elements of every dtype.
inline constexpr std::size_t kChunkAlignmentBytes = 64;

/// The size of the chunks into which a unit of `size_bytes` is cut, a multiple of `alignment_bytes`. `chunk_bytes` is
/// the upper limit.
std::size_t spread_chunk_bytes(std::size_t size_bytes, std::size_t server_count, std::size_t chunk_bytes,
                               std::size_t alignment_bytes = kChunkAlignmentBytes);

/// How many bytes each worker may push to a dedicated server without a result (scheme/push_window.h): its share of what
/// all workers may together. Chunks are not larger.
inline std::size_t window_bytes(int worker_count) {
  constexpr std::size_t together = std::size_t{1} << 20;
  constexpr std::size_t least = std::size_t{64} << 10;
  return std::max(least, together / static_cast<std::size_t>(std::max(worker_count, 1)));
}

/// The upper limit of chunks where `chunk_bytes` is asked for. A chunk fits the worker's share of a dedicated server's
/// window, because its result waits for all workers' parts.
std::size_t most_chunk_bytes(const Cluster& cluster, std::size_t chunk_bytes);

/// Fills in the chunks and blocks of `plan.units`, and `plan.server_bytes`. The rest of `plan` must be complete.
void assign_chunks(Plan& plan, const Options& options);

}  // namespace poseidon
