// The loop side of ClientImpl: exchanges, messages and failures.
#include <utility>

#include "base/memory_guard.h"
#include "client/client_impl.h"
#include "wire/messages/ending.h"

namespace poseidon {

namespace {
constexpr Priority kFirst{wire::kFirstPriority + 1, 0};

std::string bytes_text(std::uint64_t count) { return concat(count, " bytes"); }

bool only_shows_life(const wire::Header& header) {
  return header.kind == wire::Kind::heartbeat || header.kind == wire::Kind::waiting || header.kind == wire::Kind::rate;
}
}  // namespace

/// Connects to the plan's servers. In large jobs that happens when a plan first needs them.
void ClientImpl::connect_servers(const Plan& plan) {
  loop_->check_thread();
  if (closing_ || leaving_) return;
  if (departures_.closed() != nullptr) return fail_if(departures_.closed());  // the one that has left may be among them
  connections_.connect_servers(plan);
  if (!connections_.all_greeted()) steps_.set_unlinked();
}

void ClientImpl::add_units(const std::shared_ptr<const Plan>& plan, bool transient) {
  loop_->check_thread();
  for (UnitState* unit : steps_.add(plan, transient, connections_.links())) {
    const std::uint32_t id = unit->syncer.unit().id;
    units_by_id_[id] = unit;
    // A transient unit, such as a barrier, is small and somebody waits for it. So it overtakes gradients.
    if (transient) connections_.priorities().set(id, kFirst);
  }
  if (!closing_ && !leaving_ && departures_.closed() == nullptr) announcer_.announce(*plan, connections_.links());
}

void ClientImpl::begin(UnitState& unit, Operation&& operation) {
  loop_->check_thread();
  if (closing_) return steps_.release(unit);  // the client has failed or shut down since the start was accepted
  if (leaving_) return;                       // it ends when the client does
  if (const Departure* const why = departures_.prevents(unit, operation)) {
    fail_if(why);
    return steps_.release(unit);
  }
  if (needs_peers(unit, operation)) {
    waiting_for_peers_.emplace_back(&unit, std::move(operation));
    return connections_.connect_all_peers();
  }
  run(unit, std::move(operation));
}

void ClientImpl::run(UnitState& unit, Operation&& operation) {
  loop_->check_thread();
  const Status status = guard_memory(
      [&] {
        unit.syncer.start(std::move(operation));
        return Status();
      },
      [&unit] { return "layer '" + unit.syncer.unit().name + "' of " + bytes_text(unit.syncer.unit().size_bytes); });
  if (!status.ok()) return fail(status.with_context(connections_.here()), {});
  fail_if(departures_.ends(unit));
}

/// Whether the exchange has to wait until all peers are connected. In large jobs that happens when one first needs
/// them.
bool ClientImpl::needs_peers(const UnitState& unit, const Operation& operation) const {
  return std::holds_alternative<Push>(operation) && traits_of(unit.syncer.next_scheme()).uses_peers &&
         !connections_.all_peers_greeted();
}

/// A process has greeted. What has waited for peers goes on, even if this rank leaves: its program contributed it
/// before.
void ClientImpl::greeted() {
  loop_->check_thread();
  if (connections_.all_greeted()) steps_.set_linked(connections_.core_counts());
  if (!connections_.all_peers_greeted()) return;
  for (auto& [unit, operation] : std::exchange(waiting_for_peers_, {}))
    if (!closing_) run(*unit, std::move(operation));  // a failure has released the rest
  for (const auto& [task, begin] : std::exchange(calls_waiting_for_peers_, {})) begin_call(task, begin);
}

void ClientImpl::finished(UnitState& unit) {
  loop_->check_thread();
  const Exchange& exchange = unit.syncer.exchange();
  const Status& status = exchange.progress.status;
  if (status.ok()) unit.gather_members();
  // If the client has failed, fail() does nothing. If only this exchange has failed, the job ends, because nothing may
  // go on after half a step.
  if (!status.ok()) fail(status.with_context(connections_.here() + ": layer '" + unit.syncer.unit().name + "'"), {});
  if (std::holds_alternative<Restore>(exchange.operation))
    announcer_.set_restored_version(exchange.outcome.oldest_version);
  steps_.complete(unit);
}

Result<std::span<std::byte>> ClientImpl::accept(Flow& flow, const wire::Header& header, bool lent) {
  loop_->check_thread();
  LinkState& link = flow.context<LinkState>();
  note_arrival(link, header);
  if (!lent && header.payload_bytes > 0) {
    link.in_payload = true;
    link.receiving = header;
    link.received_bytes = 0;
    downlink_priority_.note_payload(link, true);
  }
  auto place = guard_memory([&] { return place_for(link, header, lent); },
                            [&header] { return "a payload of " + bytes_text(header.payload_bytes); });
  if (!place.ok()) return reject(link, place.status().with_context(connections_.describe(link)));
  return place;
}

/// A heartbeat is no progress: whoever waits for a step of a rank that only lives has to be told. A rate is none
/// either, because other jobs may be its reason.
void ClientImpl::note_arrival(LinkState& link, const wire::Header& header) {
  if (only_shows_life(header))
    link.last_sign_ns = now_ns();
  else
    connections_.heard(link);
}

/// Checks a message, and notes in the link who takes it.
Result<std::span<std::byte>> ClientImpl::place_for(LinkState& link, const wire::Header& header, bool lent) {
  const wire::Direction direction = link.direction();
  if (Status status = wire::check_kind(header.kind, direction, header.payload_bytes); !status.ok()) return status;
  link.addressee = nullptr;
  if (wire::handling_of(header.kind, direction) == wire::Handling::exchanged) {
    link.addressee = addressee(link, header);
    if (link.addressee == nullptr)
      return Status(ErrorCode::mismatch,
                    std::string("sent a ") + wire::kind_name(header.kind) + " message that is not expected from it");
    return link.addressee->accept(header, lent);
  }
  if (!lent) link.text = Buffer(header.payload_bytes);
  return lent ? std::span<std::byte>() : link.text.span();
}

void ClientImpl::on_progress(Flow& flow, const wire::Header&, std::size_t received_bytes) {
  loop_->check_thread();
  LinkState& link = flow.context<LinkState>();
  connections_.heard(link);
  downlink_priority_.note_part(link, received_bytes - std::exchange(link.received_bytes, received_bytes));
}

Status ClientImpl::reject(const LinkState& link, const Status& status) {
  // If only this flow ended, its peer would take this process for dead. So everybody is told why.
  if (link.known()) fail(status.with_context(connections_.here()), FailureCause::of(FailureSource::found, link));
  return status;
}

Status ClientImpl::on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  loop_->check_thread();
  LinkState& link = flow.context<LinkState>();
  note_arrival(link, header);
  if (std::exchange(link.in_payload, false)) {
    downlink_priority_.note_part(link, header.payload_bytes - link.received_bytes);
    downlink_priority_.note_payload(link, false);
  }
  if (!only_shows_life(header))
    connections_.note(FlightEvent::Kind::message, link, wire::kind_name(header.kind), &header);
  Status status = guard_memory([&] { return take(link, header, payload); },
                               [&header] { return "a payload of " + bytes_text(header.payload_bytes); });
  if (release) release();
  if (status.ok() || !link.known()) return status;
  fail(status.with_context(connections_.here()), FailureCause::of(FailureSource::found, link));
  return {};  // the flow is closing; an error would cut off the message that says why
}

Status ClientImpl::take(LinkState& link, const wire::Header& header, std::span<const std::byte> payload) {
  if (link.addressee == nullptr) return handle(link, header, payload);
  Status status = link.addressee->on_message(header, payload);
  return status.ok() ? status : status.with_context(connections_.describe(link));
}

Status ClientImpl::handle(LinkState& link, const wire::Header& header, std::span<const std::byte> payload) {
  switch (header.kind) {
#define POSEIDON_KIND(name, ...)                                                       \
  case wire::Kind::name:                                                               \
    if constexpr (wire::has_handler(wire::Kind::name, wire::Direction::from_server) || \
                  wire::has_handler(wire::Kind::name, wire::Direction::from_peer))     \
      return Handlers::name(*this, link, header, payload);                             \
    break;
#include "wire/kinds.def"
    case wire::Kind::none:
      break;
  }
  return {};  // place_for has refused it
}

/// Returns the unit to which factors, a result or a value belong; null if they belong to none or come over the wrong
/// link.
Addressee* ClientImpl::addressee(const LinkState& link, const wire::Header& header) {
  if (header.kind == wire::Kind::piece) return link.greeted && header.rank == link.index ? &collectives_ : nullptr;
  const auto unit = units_by_id_.find(header.unit);
  if (!link.greeted || unit == units_by_id_.end()) return nullptr;
  Syncer& syncer = unit->second->syncer;
  if (link.kind == LinkKind::peer) return connections_.may_bring(link, header) ? &syncer : nullptr;
  const auto& chunks = syncer.unit().chunks;
  return header.chunk < chunks.size() && belongs(link, chunks[header.chunk]) ? &syncer : nullptr;
}

/// Whether messages about the chunk come over this connection to a server.
bool ClientImpl::belongs(const LinkState& link, const Chunk& chunk) const {
  if (static_cast<std::size_t>(chunk.server) != link.index) return false;
  const Links& links = connections_.links();
  return links.lane_of(chunk, link.lane % links.class_count) == link.lane;
}

void ClientImpl::on_closed(Flow& flow, const Status& status) {
  loop_->check_thread();
  const auto node = connections_.remove(flow);
  const LinkState& link = node.mapped();
  if (link.in_payload) downlink_priority_.note_payload(link, false);
  if (closing_) return steps_.set_closed(connections_.empty());
  if (!link.known()) return;  // the process at the other end has not identified itself
  const bool waits_for_peers = !waiting_for_peers_.empty() || !calls_waiting_for_peers_.empty();
  if (link.left) return fail_if(departures_.closed(link, waits_for_peers));
  if (status.code() == ErrorCode::peer_lost && connections_.redial(link)) return;
  if (status.code() != ErrorCode::peer_lost)
    return fail(status.with_context(connections_.here() + " ends the connection to " + connections_.describe(link)),
                FailureCause::of(FailureSource::found, link));
  fail({ErrorCode::peer_lost, connections_.here() + " lost " + connections_.describe(link) + " while " +
                                  report_.describe_waiting() + ": " + status.message() +
                                  connections_.what_to_check(status.message()) + connections_.last_heard()},
       FailureCause::of(FailureSource::lost, link));
}

void ClientImpl::fail_silent(std::chrono::milliseconds patience) {
  loop_->check_thread();
  fail({ErrorCode::timeout, concat(connections_.here(), " heard nothing for ", patience.count(), " ms while ",
                                   report_.describe_waiting(), connections_.last_heard(), heartbeats_.waits_of_others(),
                                   "; see whether the others still run, or raise POSEIDON_TIMEOUT")},
       {FailureSource::silent});
}

void ClientImpl::fail_if(const Departure* departure) {
  if (departure != nullptr) fail(departure->status, departure->cause);
}

void ClientImpl::fail(const Status& status, const FailureCause& cause) {
  loop_->check_thread();
  if (closing_) return;
  if (leaving_) return stop_in_order();  // this rank has all that its program has waited for
  FlightEvent event;
  event.kind = FlightEvent::Kind::failed;
  event.what = error_code_name(status.code()).data();  // names are literals
  event.party = cause.party;
  event.index = cause.index;
  connections_.recorder().note(event);
  // Each process passes on the status that it was told, so that all ranks name one cause.
  const wire::TextMessage message = wire::Abort{status, cause.planned}.make();
  const auto record = report_.new_record(cause);
  if (!record) return stop(status, message.header, message.text, {});
  stop({status.code(), status.message() + "; flight record: " + record->path}, message.header, message.text,
       [&] { report_.write(*record, status, cause); });
}

/// `when_told` runs when the peers have been told, before any exchange ends.
void ClientImpl::stop(const Status& status, const wire::Header& last_message,
                      const std::shared_ptr<const std::string>& text, const std::function<void()>& when_told) {
  loop_->check_thread();
  if (closing_) return;
  closing_ = true;
  heartbeats_.end();
  downlink_priority_.end();
  steps_.end(status);
  // The connections close first, so that nothing is received into memory that is about to be given back.
  connections_.close(last_message, text);
  if (when_told) when_told();
  for (const auto& [task, begin] : std::exchange(calls_waiting_for_peers_, {})) steps_.end_task(task, std::nullopt);
  collectives_.fail();
  for (auto& [id, unit] : units_by_id_) {
    if (unit->syncer.exchange().progress.running)
      unit->syncer.fail(status);
    else
      steps_.release(*unit);  // a group that still waited for members
  }
  steps_.set_closed(connections_.empty());
}

}  // namespace poseidon
