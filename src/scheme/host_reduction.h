// The workers of one machine add up their gradients of a chunk among themselves. The chunk's leader (plan/hosts.h)
// pushes the sum to the chunk's server, and gives the result to the others (Poseidon §5.1, "Multi-GPU Settings").
//
// The parts are added in rank order, and a server adds the machines' sums in the order of the machines. So the bits do
// not depend on the timing. Inside a machine numbers travel as they are. A narrower wire format begins at the leader,
// which also keeps what it rounds off.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "scheme/scheme.h"

namespace poseidon::host_reduction {

/// Whether the running exchange goes by machine.
bool applies(const Exchange& exchange, const Links& links);
/// Whether this worker leads the chunk.
bool leads(const Exchange& exchange, const Links& links, const Chunk& chunk);

/// The envelope of what a unit sends to its servers. A unit that goes by machine speaks for the machine, whose number
/// follows those of the ranks.
wire::Envelope envelope_to_server(const Exchange& exchange, const Links& links);

/// Begins to contribute this worker's part of the chunk.
void contribute(Exchange& exchange, const Links& links, const Chunk& chunk);

/// accept() and receive() for another worker's part of a chunk that this worker leads. Such a part may be of the next
/// step, whose inbox is kept for it. Once the exchange of `inbox` runs, call push_if_whole() after store_part().
Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                       const Links& links);
void store_part(PeerInbox& inbox, const wire::Header& header, std::span<const std::byte> payload, const Links& links);
/// Pushes the chunk's sum to its server when all parts of this machine are here, this worker's own included.
void push_if_whole(Exchange& exchange, const Links& links, const Chunk& chunk);

/// Gives a chunk's result to the other workers of this machine that want it, and tells the rest that the step has
/// ended. `values` are in the unit's dtype, and stay where they are until the exchange ends; they are empty if nobody
/// has contributed.
void pass_on(Exchange& exchange, const Links& links, const wire::Header& result, std::span<const std::byte> values);

/// Whether other workers of this machine want the result of a chunk that this worker leads. Known once it is pushed.
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
