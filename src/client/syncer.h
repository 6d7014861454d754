// Syncer: the state machine of one unit (Poseidon §4.1, Table 2). It never blocks a thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "base/one_thread.h"
#include "base/pinned.h"
#include "scheme/exchange.h"
#include "scheme/scheme.h"
#include "transport/addressee.h"

namespace poseidon {

/// The states are idle → (start) → running → (on_done) → idle. Only the loop's thread uses it.
class Syncer final : public Addressee, private Pinned {
 public:
  /// `unit` and `links` must outlive the syncer. `on_done` runs once per start.
  Syncer(const Unit& unit, const Layer& first_layer, bool transient, const Cluster& cluster, const Links& links,
         std::function<void(Syncer&)> on_done);

  void start(Operation operation);

  /// Handle a message of this unit.
  Result<std::span<std::byte>> accept(const wire::Header& header, bool lent) override;
  Status on_message(const wire::Header& header, std::span<const std::byte> payload) override;

  /// Ends the running exchange with `status` as soon as its memory is free.
  void fail(const Status& status);

  /// See Client::set_residual.
  Status set_residual(std::span<const std::byte> residual);

  /// Sets K, summed over the workers. All ranks agree on it before the first exchange.
  void set_factor_count(std::uint64_t factor_count);
  /// Sets the scheme that was chosen for the next starts. The layer may take it (automatic_schemes()).
  void choose(const SchemeChoice& choice);
  /// The scheme of the next start.
  Scheme next_scheme() const { return one_thread_.checked(next_scheme_); }

  const Unit& unit() const { return exchange_.unit(); }
  const Exchange& exchange() const { return one_thread_.checked(exchange_); }
  /// Describes what the running exchange waits for, for error messages.
  std::string waiting_for() const;
  /// Whether an exchange runs that needs a peer's part, or a result from it; or only a part.
  bool lacks(std::size_t peer) const;
  bool lacks_part(std::size_t peer) const;

 private:
  /// Whether an exchange runs that has not failed. Only then its scheme may be asked about it.
  bool goes_on() const { return exchange().progress.running && exchange_.progress.status.ok(); }
  void finished();
  void note(FlightEvent::Kind kind) const;
  Status unexpected(const std::string& what) const;
  Status check_step(const wire::Header& header) const;
  template <typename Kind, typename Protocol>
  Result<std::span<std::byte>> make_room_early(Inbox& inbox, const wire::Header& header, const Protocol& protocol);
  Inbox take_inbox();
  void recycle(Inbox& inbox);
  void give_back_converted();

  const Links& links_;
  Cluster cluster_;
  Layer layer_;  // decides the scheme; a group never has factors
  std::function<void(Syncer&)> on_done_;
  Exchange exchange_;
  std::map<std::uint64_t, Inbox> early_;  // by step; parts that came before this worker has started the step
  std::uint64_t factor_count_ = 0;        // K, summed over the workers
  SchemeChoice choice_;
  Scheme next_scheme_ = Scheme::ps;
  [[no_unique_address]] OneThread one_thread_{"Syncer"};
};

}  // namespace poseidon
