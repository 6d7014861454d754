// UnitState and LayerState: a client's state of one unit and of its layers.
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

/// Returns ErrorCode::invalid_argument with the layer's name and the reason.
Status invalid_layer(const Layer& layer, const std::string& why);
/// Returns ErrorCode::invalid_argument for a number that no layer has.
Status no_layer(std::uint32_t layer);

struct LayerState;

/// The state of one unit. API threads and the loop share it.
struct UnitState {
  UnitState(std::shared_ptr<const Plan> plan, std::size_t index, bool transient, const Links& links,
            std::function<void(UnitState&)> on_done);
  std::shared_ptr<const Plan> plan;  // keeps the syncer's unit alive
  Syncer syncer;                     // only the loop's thread uses it (Syncer checks it)
  std::unique_ptr<Group> group;      // under the client's mutex until all members are in; null for a single layer
  Scheme next_scheme;                // under the client's mutex; a copy of the syncer's for API threads
  std::vector<LayerState*> layers;   // by member
  std::optional<UpdateRule> rule;  // under the client's mutex; set since the last push, and not sent to the servers yet
  // Under the client's mutex. A value that no rule makes is no parameter, and is not rounded on its way back.
  bool has_rule = false;          // of a kind, from the next push on
  std::uint32_t rule_digest = 0;  // of the rule, from the next push on
  bool value_ruled = false;       // the last push's step made the value by such a rule
  std::uint32_t behind = 0;       // under the client's mutex; how many steps behind the last exchange was

  /// Copies a group's result to the members, if it was not copied chunk by chunk. Only the loop's thread calls it
  /// (Syncer checks it).
  void gather_members();
  /// The outcome of the last exchange for one layer. A member of a group gets its share of the group's bytes. Only the
  /// loop's thread calls it (Syncer checks it).
  LayerStats stats_of(const LayerState& layer) const;
};

/// LayerStates are small and lie side by side, because a step goes over thousands of them twice.
struct LayerState {
  UnitState* unit = nullptr;
  const Layer* layer = nullptr;  // in the unit's plan
  std::size_t size_bytes = 0;
  std::uint32_t member = 0;  // index in the unit
  // Under the client's mutex. Operations have numbers from 1 on.
  bool running = false;              // the newest operation is under way
  std::uint64_t newest = 0;          // operation
  std::uint64_t completed = 0;       // the last operation that has ended without a failure
  std::span<std::byte> destination;  // set before the start is posted
  LayerStats stats;                  // under the client's mutex

  /// Checks whether the operation can start on the layer now. ErrorCode::invalid_argument says why it cannot. The
  /// caller holds the client's mutex.
  Status check_start(const Operation& operation) const;
  /// Checks whether the scheme may be chosen for the layer now. The caller holds the client's mutex.
  Status check_choice(Scheme scheme) const;

 private:
  Status check_memory(const Operation& operation) const;
  Status check_push(const Push& push) const;
  Status check_factors(const FactoredGradient& factored) const;
  Status check_rows(const LayerRows& rows) const;
};

}  // namespace poseidon
