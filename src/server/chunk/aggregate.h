// How a step is reduced by an aggregator that is not the sum (Parameter Hub §3.2.2).
#pragma once

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "poseidon/status.h"
#include "server/chunk/chunk_state.h"

namespace poseidon {

/// Returns what the step's aggregator makes of the parts that count: all that are present, and zeros for ranks that are
/// absent but count in a mean. `state` has an aggregator and all parts, of which some are present. ErrorCode::refused:
/// the parts are not what aggregators take (UpdateRule::aggregator), or there is no memory for the result.
Result<Buffer> aggregate(const ChunkState& state, BufferPool& pool);

}  // namespace poseidon
