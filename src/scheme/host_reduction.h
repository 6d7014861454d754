// The workers of one machine add up their gradients of a chunk among themselves, and then the machines of one rack do.
// Whoever leads the chunk there (plan/hosts.h) pushes the sum to the chunk's server, and gives the result to the others
// (Poseidon §5.1, "Multi-GPU Settings"; Parameter Hub §3.4).
//
// A machine's parts are added in rank order, a rack's sums in the order of its machines, and a server's in the order of
// the racks. So the bits do not depend on the timing. Numbers travel as they are inside a rack. A narrower wire format
// begins at the leader that pushes, which also keeps what it rounds off.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "scheme/scheme.h"

namespace poseidon::host_reduction {

/// Whether the running exchange goes by machine.
bool applies(const Exchange& exchange, const Links& links);
/// Whether this worker exchanges the chunk with its server, for its whole rack.
bool pushes(const Exchange& exchange, const Links& links, const Chunk& chunk);

/// The envelope of what a unit sends to its servers. A unit that goes by machine speaks for the rack (a machine without
/// racks), whose number follows those of the ranks.
wire::Envelope envelope_to_server(const Exchange& exchange, const Links& links);

/// Begins to contribute this worker's part of the chunk.
void contribute(Exchange& exchange, const Links& links, const Chunk& chunk);

/// accept() and receive() for another worker's part of a chunk that this worker leads, or a machine's sum of it. Such a
/// part may be of the next step, whose inbox is kept for it. Once the exchange of `inbox` runs, call push_if_whole()
/// after store_part().
Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                       const Links& links);
void store_part(PeerInbox& inbox, const wire::Header& header, std::span<const std::byte> payload, const Links& links);
/// Sends the chunk's sum on when all parts of it are here, this worker's own included: to its server, or to whoever
/// leads the rack.
void push_if_whole(Exchange& exchange, const Links& links, const Chunk& chunk);

/// Gives a chunk's result to those whose parts are in this worker's sum of it, if they want it, and tells the rest that
/// the step has ended. `values` are in the unit's dtype, and stay where they are until the exchange ends; they are
/// empty if nobody has contributed.
void pass_on(Exchange& exchange, const Links& links, const wire::Header& result, std::span<const std::byte> values);

/// Whether other workers want the result of a chunk that this worker leads. Known once its sum has been sent.
bool others_want_result(const Exchange& exchange, const Links& links, std::uint32_t chunk);

/// Whether a local_result about a chunk of the unit is from the chunk's leader.
bool is_from_leader(const Exchange& exchange, const Links& links, const wire::Header& header);

/// Whether a peer's gradient of a chunk that this worker leads is missing in the running exchange.
bool lacks_gradient(const Exchange& exchange, const Links& links, std::size_t peer);
/// Whether parts of a peer, or a result from it, are missing in the running exchange.
bool lacks(const Exchange& exchange, const Links& links, std::size_t peer);
/// Text such as "the gradient of chunk 3 from rank 2" about the first that is missing; empty if nothing is.
std::string missing(const Exchange& exchange, const Links& links);

}  // namespace poseidon::host_reduction
