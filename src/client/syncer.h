// Syncer: one unit's state machine (Poseidon §4.1, Table 2). Never a blocked thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "scheme/exchange.h"
#include "scheme/scheme.h"

namespace poseidon {

/// What a worker gives for one step of a unit.
struct Start {
  Operation operation = Operation::push_pull;
  std::span<std::byte> data;
  std::span<std::byte> destination;                // of the result
  std::vector<std::span<const std::byte>> pieces;  // a group's contribution, instead of both
  std::vector<std::span<std::byte>> members;       // and where its result goes, when none of it is absent
  std::uint32_t array = 0;                         // pull, assign
  std::uint64_t update_count = 0;                  // assign
  std::uint64_t version_limit = 0;                 // restore
  std::optional<UpdateRule> rule;                  // for the servers, from this step on
  std::uint32_t divisor = 1;
  bool absent = false;
  bool catches_up = false;  // in all that this rank gives there is nothing, because it is behind
  bool accumulate = false;
  bool has_factors = false;
  DType factor_dtype = DType::float32;
  std::vector<FactorRows> factors;
  std::uint64_t factor_count = 0;  // own K, whether sent as factors or not
};

/// Loop thread only. idle → (start) → running → (on_done) → idle.
class Syncer {
 public:
  /// `unit` and `links` must outlive the syncer. `on_done` runs once per start.
  Syncer(const Unit& unit, const Layer& first_layer, bool transient, const Cluster& cluster, const Links& links,
         std::function<void(Syncer&)> on_done);
  Syncer(const Syncer&) = delete;
  Syncer& operator=(const Syncer&) = delete;

  void start(Start start);

  /// A message of this unit: where its payload goes, and that it is complete.
  Result<std::span<std::byte>> on_header(const wire::Header& header);
  Status on_message(const wire::Header& header, std::span<const std::byte> payload);

  /// Ends the running exchange with `status` as soon as its memory is free.
  void fail(const Status& status);

  /// K summed over the workers, agreed on before the first exchange.
  void set_factor_count(std::uint64_t factor_count);
  /// The scheme that the next start takes.
  Scheme next_scheme() const { return next_scheme_; }

  const Unit& unit() const { return *exchange_.unit; }
  const Exchange& exchange() const { return exchange_; }
  /// For messages: what the running exchange waits for.
  std::string waiting_for() const;

 private:
  void finished();
  void note(FlightEvent::Kind kind) const;
  Status check_step(const wire::Header& header) const;
  Inbox take_inbox();
  void recycle(Inbox& inbox);
  Inbox empty_inbox() const;

  const Links& links_;
  Cluster cluster_;
  Layer layer_;  // decides the scheme; a group never has factors
  std::function<void(Syncer&)> on_done_;
  Exchange exchange_;
  std::map<std::uint64_t, Inbox> early_;  // by step: what came before this worker started it
  Scheme next_scheme_ = Scheme::ps;
};

}  // namespace poseidon
