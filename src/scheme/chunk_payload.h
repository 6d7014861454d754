// Where the bytes of a chunk lie in this worker's memory.
#pragma once

#include <span>

#include "scheme/scheme.h"

namespace poseidon {

/// Returns what the operation sends of a chunk, where it lies: in one piece, or in the pieces of a group. Empty if it
/// sends nothing.
Pieces chunk_payload(const Exchange& exchange, const Chunk& chunk);

/// Returns where the result of a chunk is written.
std::span<std::byte> place_of(const Exchange& exchange, const Chunk& chunk);

/// Copies the pieces one after the other. `out` has room for all.
void copy_pieces(const Pieces& pieces, std::byte* out);

/// Returns the pieces as one. Several are copied to memory that stays until the exchange ends. There is at least one.
std::span<const std::byte> in_one_piece(Exchange& exchange, const Pieces& pieces, const Links& links);

}  // namespace poseidon
