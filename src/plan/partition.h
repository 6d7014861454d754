// Cutting units into chunks and spreading the chunks over the shards (Poseidon §4.1).
#pragma once

#include <cstddef>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/plan.h"

namespace poseidon {

/// The least that a chunk may hold when a unit is spread: below this, messages cost more than they move.
inline constexpr std::size_t kMinChunkBytes = 16u << 10;
/// Every chunk but a unit's last is a multiple of this: a cache line, whole elements of every dtype.
inline constexpr std::size_t kChunkAlignmentBytes = 64;

/// The size of the chunks that a unit of `size_bytes` is cut into. `chunk_bytes` is the cap.
std::size_t spread_chunk_bytes(std::size_t size_bytes, int server_count, std::size_t chunk_bytes);

/// Fills `plan.units[…].chunks` and `plan.server_bytes`; the rest of `plan` is complete.
void assign_chunks(Plan& plan, const Options& options);

}  // namespace poseidon
