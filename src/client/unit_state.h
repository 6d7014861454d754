// UnitState and LayerState: what a client knows of one unit and of its layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/group.h"
#include "client/syncer.h"
#include "poseidon/client.h"

namespace poseidon {

/// ErrorCode::invalid_argument with the layer's name and what is wrong with the caller's request.
Status invalid_layer(const Layer& layer, const std::string& why);

struct LayerState;

/// One unit with what the API threads and the loop share of it.
struct UnitState {
  UnitState(std::shared_ptr<const Plan> plan, std::size_t index, bool transient, const Links& links,
            std::function<void(UnitState&)> on_done);
  std::shared_ptr<const Plan> plan;  // keeps the syncer's unit alive
  Syncer syncer;                     // loop
  std::unique_ptr<Group> group;      // under the client's mutex until all have come; null for one layer
  Scheme next_scheme;                // under the client's mutex: the syncer's, for API threads
  std::vector<LayerState*> layers;   // by member
  std::optional<UpdateRule> rule;    // under the client's mutex: set since the last push, not yet told to the servers
  std::uint32_t behind = 0;          // under the client's mutex: as its last exchange was

  /// Copies a group's result to the members, if it did not go there chunk by chunk. The loop's thread.
  void gather_members();
  /// What came of the last exchange for one of the layers: of a group's, its share. The loop's thread.
  LayerStats stats_of(const LayerState& layer) const;
};

/// Small and side by side: a step of thousands of layers goes over all of them twice.
struct LayerState {
  UnitState* unit = nullptr;
  const Layer* layer = nullptr;  // in the unit's plan
  std::size_t size_bytes = 0;
  std::uint32_t member = 0;          // index in the unit
  bool running = false;              // under the client's mutex
  std::span<std::byte> destination;  // set before the start is posted
  LayerStats stats;                  // under the client's mutex

  /// Whether the operation can start on the layer now. ErrorCode::invalid_argument says why not. Under the client's
  /// mutex.
  Status check_start(const Operation& operation) const;

 private:
  Status check_memory(const Operation& operation) const;
  Status check_push(const Push& push) const;
  Status check_factors(const FactoredGradient& factored) const;
};

}  // namespace poseidon
