// Exchange: one unit's synchronization in one step, from this worker's contribution to the result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/invariant.h"
#include "kernel/kernel.h"
#include "plan/priority.h"
#include "poseidon/client.h"
#include "poseidon/plan.h"
#include "scheme/operation.h"
#include "wire/kinds.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// One worker's part of an exchange between peers.
struct Part {
  bool accepted = false;  // its header has been checked, and it has its memory
  bool arrived = false;
  bool present = false;
  std::uint32_t factor_count = 0;
  std::vector<kernel::FactorTerm> terms;  // the factors or the dense gradients, in order
  kernel::RowTerm rows;                   // of the scheme rows, instead of `terms`
  Buffer buffer;                          // the memory of `terms` and `rows`; empty if this worker's own part has none
};

/// What another worker has given to a chunk's leader: its gradient, or its machine's sum (host_reduction.h).
struct LocalPart {
  bool accepted = false;  // its header has been checked, and it has its memory
  bool arrived = false;
  wire::Contribution push;
  Buffer buffer;
};
struct LocalChunk {
  std::vector<LocalPart> parts;  // by their numbers (Hosts::part_of); empty if none has come
  std::size_t arrived_count = 0;
};

/// What peers have sent each other for one step of a unit.
struct PeerInbox {
  wire::Kind kind = wire::Kind::none;  // of the parts' messages, once one has come
  std::vector<Part> parts;             // by rank; empty if none has come
  std::size_t arrived_count = 0;
  std::uint64_t passed_on_bytes = 0;  // over a network
};

/// What workers of this machine or rack have given to the chunks' leaders for one step of a unit (host_reduction.h).
struct HostInbox {
  std::vector<LocalChunk> chunks;  // by chunk; empty if none has parts
};

/// What other workers have sent for one step. They may be one step ahead, so a syncer keeps two.
using Inbox = std::variant<std::monostate, PeerInbox, HostInbox>;

/// What is exchanged. It is the same in every step.
struct ExchangeUnit {
  const Unit* unit = nullptr;
  const Layer* layer = nullptr;  // null for a group
  std::size_t rows = 0;          // of a layer whose gradient may be factors or rows; 0 for others
  std::size_t cols = 0;
  bool row_gradient = false;
  bool transient = false;  // servers forget it after each step
  bool stored = false;     // servers keep its value
  bool by_host = false;    // a scheme that can do so adds up by machine
};

/// How far the answer about a chunk has come. An answer is accepted once, when its header is here; from then on it is
/// expected to complete.
enum class ChunkArrival : std::uint8_t { awaited, accepted, received };

/// What is awaited of servers, and has come from them.
struct ServerAnswers {
  std::vector<ChunkArrival> chunks;
  std::vector<std::uint32_t> empty_chunks;  // chunks to which nobody contributed
  std::size_t missing_count = 0;            // of chunks
  std::vector<Buffer> staged;               // by chunk: answers that are copied from here to where they belong
  std::vector<std::uint64_t> bases;         // by chunk: digests of values that answers may differ from; empty: none
  /// By chunk: differences whose base was no longer there. Their whole values are awaited.
  std::map<std::uint32_t, wire::Header> asked_again;
  Buffer group_result;  // for a group whose members have to wait for the footer
};

/// The result of the scheme rows, if the caller has no memory for it.
struct RowResult {
  LayerRows rows;
  Buffer memory;  // of `rows`
};

/// How far an exchange has come. Each exchange has a new one, with the parts that its scheme needs.
struct Progress {
  bool running = false;
  bool computing = false;         // the executor works on it
  bool contributing = false;      // this worker's contribution is still being made
  bool received = false;          // everything expected is here
  std::size_t sends_pending = 0;  // sends that still read this worker's memory
  std::span<std::byte> result;    // where the result is written: the operation's destination, or a group's memory
  std::vector<Buffer> converted;  // memory of the pool for numbers that are converted on their way
  Status status;                  // why the exchange ends without a result

  std::optional<ServerAnswers> answers;  // if something is awaited of servers
  Inbox inbox;                           // if something is awaited of other workers
  std::optional<RowResult> row_result;   // of the scheme rows
  int round = 0;                         // of powersgd, which asks the servers twice: the exchange that is under way

  /// Returns the answers that the scheme awaits.
  ServerAnswers& awaited() {
    invariant(answers.has_value(), "a scheme that uses servers awaits their answers");
    return *answers;
  }
  const ServerAnswers& awaited() const { return const_cast<Progress*>(this)->awaited(); }
  /// Returns what other workers have sent, of the kind that the scheme takes.
  template <typename Kind>
  Kind& inbox_of() {
    invariant(std::holds_alternative<Kind>(inbox), "a scheme reads what it takes of other workers");
    return *std::get_if<Kind>(&inbox);
  }
  template <typename Kind>
  const Kind& inbox_of() const {
    return const_cast<Progress*>(this)->inbox_of<Kind>();
  }
};

class SchemeProtocol;

/// What a lossy scheme, or a wire format with error feedback, keeps of a unit from one step to the next. Only the loop
/// thread and, during an exchange, its computation use it (Syncer checks it).
struct Kept {
  Buffer memory;  // float32s: what has not been sent yet, for each element, and then what else the scheme keeps

  /// Returns the memory, which is zeros at first.
  std::span<std::byte> memory_of(std::size_t float_count) {
    if (!memory) {
      memory = Buffer(float_count * sizeof(float));
      std::ranges::fill(memory.span(), std::byte{0});
    }
    return memory.span();
  }
};

/// Owned by its syncer. Only the loop thread uses it (Syncer checks it).
struct Exchange {
  ExchangeUnit about;
  std::uint64_t step = 0;  // the number of pushes so far
  const SchemeProtocol* protocol = nullptr;
  Priority priority;
  Operation operation;
  Progress progress;
  LayerStats outcome;
  Kept kept;
  std::size_t passed_on_pending = 0;  // parts of other workers, of this step or the next, that are being passed on

  /// Runs once per start, when nothing reads or writes this worker's memory any more.
  std::function<void()> on_complete;

  const Unit& unit() const { return *about.unit; }
  /// Returns the operation if it contributes to a step, and null otherwise.
  const Push* push() const { return std::get_if<Push>(&operation); }
  /// The type in which a server's answer brings values.
  DType result_dtype() const {
    if (const Push* pushed = push()) return about.stored && !pushed->rounds_result ? unit().dtype : unit().result_dtype;
    const Pull* pull = std::get_if<Pull>(&operation);
    return pull != nullptr && pull->rounds_result ? unit().result_dtype : unit().dtype;
  }
  /// Returns the gradient that the operation contributes if it is of that kind, and null otherwise.
  template <typename Kind>
  const Kind* gradient() const {
    const Push* pushed = push();
    return pushed == nullptr ? nullptr : std::get_if<Kind>(&pushed->gradient);
  }

  /// Begins the next exchange with `next`. Of the last exchange, only the step and `kept` stay.
  void begin(Operation next, const SchemeProtocol& by, Scheme scheme, Inbox early) {
    invariant(!progress.running, "an exchange of a unit begins when the one before has ended");
    operation = std::move(next);
    protocol = &by;
    if (push() != nullptr) ++step;
    progress = Progress();
    progress.running = true;
    progress.result = destination_of(operation);
    progress.inbox = std::move(early);
    outcome = LayerStats();
    outcome.scheme = scheme;
    outcome.step = step;
  }

  /// Call it after every change of `progress`.
  void complete_if_done() {
    if (!progress.running || progress.computing || progress.sends_pending > 0 || passed_on_pending > 0) return;
    if (!progress.received && progress.status.ok()) return;
    progress.running = false;
    on_complete();
  }
};

}  // namespace poseidon
