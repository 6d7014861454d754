// Conversion: the numbers of a dense exchange travel in other types than they have in memory (Unit::wire_dtype,
// Unit::result_dtype).
//
// Each worker rounds its gradient once, the server adds what came in float32 and rounds the sum once, and every worker
// gets the same bytes, its own shard's worker included. So replicas stay equal bit by bit.
#pragma once

#include <span>

#include "scheme/scheme.h"

namespace poseidon {

/// Converts a chunk of this worker's gradient, which is given in pieces, for sending. Where the result may overwrite
/// the gradient, the converted numbers take the front of the gradient's own memory. Otherwise they take memory of the
/// pool until the exchange ends.
std::span<const std::byte> encode_chunk(Exchange& exchange, const Chunk& chunk, const Pieces& pieces,
                                        const Links& links);

/// Returns where the converted result of a chunk is received: at the end of the chunk's own place in the result if the
/// place has room for it beside what is being sent, and in memory of the pool otherwise. Here and below a result is
/// what comes back from a step, in the exchange's result_dtype.
std::span<std::byte> place_for_encoded(Exchange& exchange, const Chunk& chunk, const Links& links);

/// Converts the result of a chunk back. `encoded` may be what place_for_encoded returned.
void decode_chunk(const Exchange& exchange, std::span<const std::byte> encoded, std::span<std::byte> values);

/// What happens to factors of 16 bits whose type is not Unit::factor_dtype.
enum class NarrowFactors : std::uint8_t { stay, convert };

/// Converts this worker's factors to Unit::factor_dtype. They take memory of the pool from then on, and are multiplied
/// as they are sent. With NarrowFactors::convert the layer must be of float32.
void convert_factors(Exchange& exchange, const Links& links, NarrowFactors narrow);

}  // namespace poseidon
