// Why a server refuses what would take more memory than it has, in words.
#pragma once

#include <cstdint>

#include "base/buffer_pool.h"
#include "poseidon/status.h"

namespace poseidon {

/// The refusal of `size_bytes` more than `pool` holds. Names the limit that they would pass.
Status no_room(const BufferPool& pool, std::uint64_t size_bytes);

}  // namespace poseidon
