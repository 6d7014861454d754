// Exchange: one unit's synchronization in one step, from this worker's contribution to the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernel/kernel.h"
#include "plan/priority.h"
#include "poseidon/client.h"
#include "poseidon/plan.h"
#include "poseidon/update.h"
#include "wire/header.h"

namespace poseidon {

/// One worker's part of an sfb exchange.
struct Part {
  bool arrived = false;
  bool present = false;
  std::uint32_t factor_count = 0;
  std::vector<kernel::FactorTerm> terms;  // of factors or of one dense gradient, in order
  Buffer buffer;                          // what `terms` points into; empty for this worker's own
};

/// What the workers have sent for one step of a unit under sfb. A peer may be a step ahead, so a
/// syncer keeps two.
struct Inbox {
  std::vector<Part> parts;  // by rank
  std::size_t arrived_count = 0;
};

/// What a worker asks of the servers for one unit.
enum class Operation : std::uint8_t {
  push_pull,  // contribute, and receive what the step makes of it
  push,       // contribute
  pull,       // receive an array that the servers keep
  assign,     // set an array that the servers keep
  restore,    // have the servers take it from their checkpoint, and receive the value
};

/// Whether it asks for an array without contributing.
constexpr bool only_receives(Operation operation) {
  return operation == Operation::pull || operation == Operation::restore;
}

/// Owned by its syncer and reused from step to step; loop thread only.
struct Exchange {
  // The unit; fixed.
  const Unit* unit = nullptr;
  std::size_t rows = 0;
  std::size_t cols = 0;
  bool transient = false;
  bool stored = false;

  // This step's contribution.
  std::uint64_t step = 0;
  Operation operation = Operation::push_pull;
  std::uint32_t array = 0;          // pull, assign: 0 the value, 1… the update rule's state
  std::uint64_t update_count = 0;   // assign: to set; pull: what came
  std::uint64_t version_limit = 0;  // restore: the newest version that may come; 0: any
  std::optional<UpdateRule> rule;   // to be told to the servers before the contribution
  Scheme scheme = Scheme::ps;
  Priority priority;
  std::uint32_t divisor = 1;
  std::uint32_t factor_count = 0;  // own K; kUnboundedFactors for a dense gradient
  bool absent = false;             // nothing to contribute
  bool catches_up = false;         // nothing that is to count (wire::kLate)
  bool accumulate = false;
  std::span<std::byte> data;         // dense gradient; sfb and adam: the factors' destination
  std::span<std::byte> destination;  // ps, adam: of the result; often the same memory
  // A group's contribution, as the unit lays it out, instead of `data`. Its result goes to the members at once
  // where this worker contributed to all of them and is in the result for sure (`members`); else, since the footer
  // has to say first which members there are, into `group_result`.
  std::vector<std::span<const std::byte>> pieces;
  std::vector<std::span<std::byte>> members;
  std::vector<Buffer> member_chunks;  // being received, by chunk, on their way to the members
  Buffer group_result;
  DType factor_dtype = DType::float32;
  std::vector<FactorRows> factors;  // used when `has_factors`
  bool has_factors = false;
  Inbox inbox;  // sfb

  // Progress.
  bool running = false;
  bool computing = false;         // the executor works on it
  bool received = false;          // everything expected is here
  std::size_t sends_pending = 0;  // sends that still read this worker's memory
  std::vector<bool> chunk_received;
  std::vector<std::uint32_t> empty_chunks;  // whose result is that nobody contributed to them
  std::size_t chunks_missing = 0;

  // Outcome.
  bool present = false;                // some worker contributed, to some chunk
  std::uint64_t factor_count_sum = 0;  // over the workers
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::size_t late_chunks = 0;       // that came too late for the step (stragglers=drop)
  std::uint32_t behind = 0;          // steps that such a chunk is ahead, at most
  std::uint64_t oldest_version = 0;  // restore: of what came
  std::uint64_t newest_version = 0;
  Status status;

  /// Runs once per step, when nothing reads or writes this worker's memory any more.
  std::function<void()> on_complete;

  /// To be called after every change of the progress fields.
  void complete_if_done() {
    if (!running || computing || sends_pending > 0 || (!received && status.ok())) return;
    running = false;
    on_complete();
  }
};

}  // namespace poseidon
