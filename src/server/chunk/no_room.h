// The text with which a server refuses what would take more memory than it has.
#pragma once

#include <cstdint>

#include "base/buffer_pool.h"
#include "poseidon/status.h"

namespace poseidon {

/// Returns the refusal of `size_bytes` more than `pool` holds. It names the limit that they would exceed.
Status no_room(const BufferPool& pool, std::uint64_t size_bytes);

}  // namespace poseidon
