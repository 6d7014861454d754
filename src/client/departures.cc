#include "client/departures.h"

namespace poseidon {

Departure Departures::departure_of(const LinkState& link) const {
  return {{ErrorCode::peer_lost, connections_.describe(link) + " has shut down, " + connections_.here() +
                                     " goes on; give every rank the same number of steps, or use join()"},
          FailureCause::of(FailureSource::left, link)};
}

/// A tensor without elements has no chunks and needs no other process, so others may have left before it. Values can be
/// had from the server of a process whose worker has left.
const Departure* Departures::prevents(const UnitState& unit, const Operation& operation) const {
  if (!departure_ || unit.syncer.unit().chunks.empty()) return nullptr;
  const bool server_left = departure_->cause.party == FlightEvent::Party::server;
  return server_left || !std::holds_alternative<Pull>(operation) ? &*departure_ : nullptr;
}

const Departure* Departures::ends(const UnitState& unit) const {
  for (const Departure& leaver : leavers_)
    if (unit.syncer.lacks_part(leaver.cause.index)) return &leaver;
  return nullptr;
}

const Departure* Departures::ends_collective() const {
  for (const Departure& leaver : leavers_)
    if (collectives_.lacks(leaver.cause.index)) return &leaver;
  return nullptr;
}

/// What a peer has contributed to has come before its goodbye. A server tells its workers itself what lacks the
/// contribution of a rank that leaves.
const Departure* Departures::said_goodbye(LinkState& link) {
  link.left = true;
  if (link.kind != LinkKind::peer || !link.known() || !connections_.is_last(link)) return nullptr;
  leavers_.push_back(departure_of(link));
  for (const auto& [id, unit] : units_)
    if (const Departure* const why = ends(*unit)) return why;
  return ends_collective();
}

const Departure* Departures::closed(const LinkState& link, bool waits_for_peers) {
  if (!departure_ || link.kind == LinkKind::server) departure_ = departure_of(link);
  return needs(link) || waits_for_peers ? &*departure_ : nullptr;
}

/// Whether an exchange waits for something that cannot come any more because this link has closed. A server's results
/// come over the connection of their pushes, some of which may still be made. A peer's factors may come over any of its
/// connections.
bool Departures::needs(const LinkState& link) const {
  const bool last = connections_.is_last(link);
  const Links& links = connections_.links();
  if (last && link.kind == LinkKind::peer && collectives_.lacks(static_cast<std::uint32_t>(link.index))) return true;
  for (const auto& [id, unit] : units_) {
    const Exchange& exchange = unit->syncer.exchange();
    const Progress& progress = exchange.progress;
    if (!progress.running || progress.received) continue;
    if (link.kind == LinkKind::peer) {
      if (last && unit->syncer.lacks(link.index)) return true;
      continue;
    }
    if (!progress.answers) continue;
    for (const Chunk& chunk : exchange.unit().chunks) {
      const bool comes_here = static_cast<std::size_t>(chunk.server) == link.index &&
                              exchange.protocol->exchanges_with_server(exchange, links, chunk) &&
                              links.lane_of(chunk, exchange.priority.priority_class) == link.lane;
      const bool is_here = progress.answers->chunks[chunk.index] == ChunkArrival::received;
      if (comes_here && (progress.contributing || !is_here)) return true;
    }
  }
  return false;
}

}  // namespace poseidon
