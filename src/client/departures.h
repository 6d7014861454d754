// Departures: which processes have left the job in order, and which exchanges fail because of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "client/connections.h"
#include "client/unit_state.h"
#include "collective/collectives.h"

namespace poseidon {

/// What an exchange that needs a process which leaves fails with.
struct Departure {
  Status status;
  FailureCause cause;
};

/// Only the loop's thread uses it (Connections checks it).
class Departures {
 public:
  /// Both must outlive it. `units` has the client's units by id.
  Departures(const Connections& connections, const std::map<std::uint32_t, UnitState*>& units,
             const Collectives& collectives)
      : connections_(connections), units_(units), collectives_(collectives) {}

  /// Whether nobody leaves.
  bool none() const { return leavers_.empty() && !departure_; }
  /// Why nothing can start any more, because a peer or a server has closed a connection. Null: everything can.
  const Departure* closed() const { return departure_ ? &*departure_ : nullptr; }
  /// Why this operation cannot start any more. Null: it can.
  const Departure* prevents(const UnitState& unit, const Operation& operation) const;
  /// Why the unit's exchange, if one runs, cannot end any more. Null: it can.
  const Departure* ends(const UnitState& unit) const;
  /// Why some collective that is under way cannot end any more. Null: all can.
  const Departure* ends_collective() const;

  /// The other end starts nothing any more. Returns why the job fails, if an exchange needs what it will not send.
  const Departure* said_goodbye(LinkState& link);
  /// A connection has closed whose other end has said goodbye. Returns why the job fails, if an exchange needs it, or
  /// if something still `waits_for_peers` here, which whoever leaves has not started.
  const Departure* closed(const LinkState& link, bool waits_for_peers);

 private:
  Departure departure_of(const LinkState& link) const;
  bool needs(const LinkState& link) const;

  const Connections& connections_;
  const std::map<std::uint32_t, UnitState*>& units_;
  const Collectives& collectives_;
  std::vector<Departure> leavers_;      // peers that start nothing any more, but may have contributed to the next steps
  std::optional<Departure> departure_;  // of a connection that has closed; of a server, if one has
};

}  // namespace poseidon
