#include "client/syncer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "scheme/factor_broadcast.h"

namespace poseidon {

Syncer::Syncer(const Unit& unit, const Layer& first_layer, bool transient, const Cluster& cluster, const Links& links,
               std::function<void(Syncer&)> on_done)
    : links_(links), cluster_(cluster), layer_(first_layer), on_done_(std::move(on_done)) {
  exchange_.unit = &unit;
  exchange_.transient = transient;
  exchange_.stored = first_layer.stored;
  if (!unit.grouped()) {
    exchange_.rows = layer_.rows;
    exchange_.cols = layer_.cols;
  }
  exchange_.on_complete = [this] { finished(); };
  set_factor_count(0);
}

void Syncer::set_factor_count(std::uint64_t factor_count) {
  if (unit().grouped()) {
    next_scheme_ = Scheme::ps;
    return;
  }
  // A mean over the workers: what the busiest port carries is close to it, and the sum travels with
  // every exchange, so all ranks decide alike without a message of their own.
  const double mean = std::ceil(static_cast<double>(factor_count) / cluster_.worker_count);
  next_scheme_ = factor_count >= wire::kUnboundedFactors && layer_.scheme == Scheme::automatic
                     ? Scheme::ps
                     : best_scheme(layer_, mean, cluster_);
}

Inbox Syncer::empty_inbox() const {
  Inbox inbox;
  inbox.parts.resize(links_.worker_count);
  return inbox;
}

void Syncer::recycle(Inbox& inbox) {
  for (auto& part : inbox.parts)
    if (part.buffer) links_.pool->give_back(std::move(part.buffer));
  inbox = Inbox();
}

Inbox Syncer::take_inbox() {
  auto found = early_.find(exchange_.step);
  if (found == early_.end()) return empty_inbox();
  Inbox inbox = std::move(found->second);
  early_.erase(found);
  return inbox;
}

void Syncer::note(FlightEvent::Kind kind) const {
  FlightEvent event;
  event.kind = kind;
  event.what = scheme_name(exchange_.scheme).data();  // names are literals
  event.unit = unit().id;
  event.step = exchange_.step;
  event.bytes = unit().size_bytes;
  links_.recorder->note(event);
}

void Syncer::start(Start start) {
  recycle(exchange_.inbox);
  if (start.operation == Operation::push_pull || start.operation == Operation::push) ++exchange_.step;
  // Nobody answers an assignment: what follows it has to take the same flows to stay behind it.
  if (exchange_.operation != Operation::assign) exchange_.priority = links_.priorities.of(unit().id);
  exchange_.operation = start.operation;
  exchange_.array = start.array;
  exchange_.update_count = start.update_count;
  exchange_.version_limit = start.version_limit;
  exchange_.rule = start.rule;
  exchange_.scheme = next_scheme_;
  exchange_.data = start.data;
  exchange_.destination = start.destination;
  exchange_.pieces = std::move(start.pieces);
  exchange_.members = std::move(start.members);
  exchange_.divisor = start.divisor;
  exchange_.absent = start.absent;
  exchange_.catches_up = start.catches_up && !exchange_.transient;
  exchange_.accumulate = start.accumulate;
  exchange_.has_factors = start.has_factors;
  exchange_.factor_dtype = start.factor_dtype;
  exchange_.factors = std::move(start.factors);
  exchange_.factor_count =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(start.factor_count, wire::kUnboundedFactors));
  exchange_.inbox = take_inbox();
  exchange_.running = true;
  exchange_.computing = false;
  exchange_.received = false;
  exchange_.present = false;
  exchange_.factor_count_sum = 0;
  exchange_.bytes_sent = 0;
  exchange_.bytes_received = 0;
  exchange_.late_chunks = 0;
  exchange_.behind = 0;
  exchange_.oldest_version = 0;
  exchange_.newest_version = 0;
  note(FlightEvent::Kind::start);
  if (exchange_.scheme != Scheme::sfb && exchange_.inbox.arrived_count > 0)
    return fail({ErrorCode::mismatch, "a peer has sent factors in step " + std::to_string(exchange_.step) +
                                          ", which takes scheme " + std::string(scheme_name(exchange_.scheme)) +
                                          " here"});
  protocol_of(exchange_.scheme).start(exchange_, links_);
}

Status Syncer::check_step(const wire::Header& header) const {
  // A peer can be one step ahead, never two: it needs this worker's part to end a step.
  const std::uint64_t current = exchange_.step;
  const bool expected = exchange_.running && header.step == current;
  if (expected || header.step == current + 1) return {};
  return {ErrorCode::mismatch, "factors of step " + std::to_string(header.step) + " came in step " +
                                   std::to_string(current) + " of '" + unit().name + "'"};
}

Result<std::span<std::byte>> Syncer::on_header(const wire::Header& header) {
  if (header.kind == wire::Kind::result || header.kind == wire::Kind::value) {
    if (exchange_.scheme == Scheme::sfb)
      return Status(ErrorCode::mismatch, "a server's result for '" + unit().name + "', which takes sfb in this step");
    return protocol_of(exchange_.scheme).destination(exchange_, header, links_);
  }
  if (Status status = check_step(header); !status.ok()) return status;
  if (header.step == exchange_.step) {
    if (exchange_.scheme != Scheme::sfb)
      return Status(ErrorCode::mismatch, "factors for '" + unit().name + "', which takes another scheme in this step");
    return protocol_of(Scheme::sfb).destination(exchange_, header, links_);
  }
  auto& inbox = early_.try_emplace(header.step, empty_inbox()).first->second;
  return FactorBroadcast::make_room(inbox, exchange_, header, links_);
}

Status Syncer::on_message(const wire::Header& header, std::span<const std::byte> payload) {
  if (header.kind == wire::Kind::result || header.kind == wire::Kind::value) {
    if (exchange_.scheme == Scheme::sfb)
      return {ErrorCode::mismatch, "a server's result for '" + unit().name + "' under sfb"};
    return protocol_of(exchange_.scheme).receive(exchange_, header, payload, links_);
  }
  if (payload.empty()) {  // then no on_header came before
    if (auto room = on_header(header); !room.ok()) return room.status();
  }
  if (header.step == exchange_.step) return protocol_of(Scheme::sfb).receive(exchange_, header, payload, links_);
  FactorBroadcast::store(early_.at(header.step), exchange_, header, payload);
  return {};
}

void Syncer::fail(const Status& status) {
  if (!exchange_.status.ok()) return;
  exchange_.status = status;
  exchange_.complete_if_done();
}

std::string Syncer::waiting_for() const { return protocol_of(exchange_.scheme).waiting_for(exchange_); }

void Syncer::finished() {
  note(FlightEvent::Kind::complete);
  if (exchange_.status.ok()) set_factor_count(exchange_.factor_count_sum);
  on_done_(*this);
  links_.pool->give_back(std::move(exchange_.group_result));
  for (Buffer& buffer : exchange_.member_chunks) links_.pool->give_back(std::move(buffer));
}

}  // namespace poseidon
