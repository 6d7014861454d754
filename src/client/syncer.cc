#include "client/syncer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/invariant.h"
#include "scheme/host_reduction.h"
#include "scheme/peer_broadcast.h"

namespace poseidon {

namespace {
bool is_from_peer(const wire::Header& header) {
  return wire::handling_of(header.kind, wire::Direction::from_peer) == wire::Handling::exchanged;
}

/// Whether it is from a worker of this machine about the machine's sum.
bool is_local(const wire::Header& header) {
  return header.kind == wire::Kind::local_push || header.kind == wire::Kind::local_result;
}
}  // namespace

Syncer::Syncer(const Unit& unit, const Layer& first_layer, bool transient, const Cluster& cluster, const Links& links,
               std::function<void(Syncer&)> on_done)
    : links_(links), cluster_(cluster), layer_(first_layer), on_done_(std::move(on_done)) {
  exchange_.about.unit = &unit;
  exchange_.about.transient = transient;
  exchange_.about.stored = first_layer.stored;
  // Integers are few. And the check of plans is of integers: another worker of this machine may send its part before
  // the layer is here, which a server can take and this worker could not.
  exchange_.about.by_host = !transient && dtype_is_floating(unit.dtype) && links.hosts.together();
  if (!unit.grouped()) {
    exchange_.about.layer = &layer_;
    exchange_.about.rows = layer_.rows;
    exchange_.about.cols = layer_.cols;
    exchange_.about.row_gradient = layer_.row_gradient;
  }
  exchange_.protocol = &protocol_of(Scheme::ps);
  exchange_.on_complete = [this] { finished(); };
  set_factor_count(0);
}

void Syncer::choose(const SchemeChoice& choice) {
  one_thread_.check();
  choice_ = choice;
  set_factor_count(factor_count_);
}

Status Syncer::set_residual(std::span<const std::byte> residual) {
  one_thread_.check();
  const auto refuse = [this](const std::string& why) {
    return Status(ErrorCode::invalid_argument, "layer '" + unit().name + "' cannot take this residual: " + why);
  };
  if (exchange_.progress.running) return refuse("an exchange of it is under way; wait for it first");
  exchange_.kept = {};
  if (residual.empty()) return {};
  const std::size_t float_count = kept_count(layer_);
  if (float_count == 0) return refuse("it never takes a lossy scheme; give it none");
  if (residual.size() != float_count * sizeof(float))
    return refuse(concat("it keeps ", float_count * sizeof(float), " bytes, and is given ", residual.size(),
                         "; load what the same model has saved"));
  std::ranges::copy(residual, exchange_.kept.memory_of(float_count).begin());
  return {};
}

void Syncer::set_factor_count(std::uint64_t factor_count) {
  one_thread_.check();
  factor_count_ = factor_count;
  // The mean over the workers is close to what the busiest port carries. Every exchange transports the sum, so all
  // ranks decide alike without further messages.
  const bool bounded = factor_count < wire::kUnboundedFactors;
  const double mean = bounded ? std::ceil(static_cast<double>(factor_count) / cluster_.worker_count) : 0;
  next_scheme_ = best_scheme(layer_, mean, cluster_, choice_);
}

void Syncer::recycle(Inbox& inbox) {
  const auto give_back = [this](auto& parts) {
    for (auto& part : parts)
      if (part.buffer) links_.pool->give_back(std::move(part.buffer));
  };
  if (auto* const of_peers = std::get_if<PeerInbox>(&inbox)) give_back(of_peers->parts);
  if (auto* const of_host = std::get_if<HostInbox>(&inbox))
    for (auto& chunk : of_host->chunks) give_back(chunk.parts);
}

/// Returns what peers have already sent for the next step.
Inbox Syncer::take_inbox() {
  const auto found = early_.find(exchange_.step + 1);
  if (found == early_.end()) return {};
  Inbox inbox = std::move(found->second);
  early_.erase(found);
  return inbox;
}

void Syncer::note(FlightEvent::Kind kind) const {
  FlightEvent event;
  event.kind = kind;
  event.what = scheme_name(exchange_.outcome.scheme).data();  // names are literals
  event.unit = unit().id;
  event.step = exchange_.step;
  event.bytes = unit().size_bytes;
  links_.recorder->note(event);
}

void Syncer::start(Operation operation) {
  one_thread_.check();
  invariant(!exchange_.progress.running, "a unit's exchange starts when the one before has ended");
  recycle(exchange_.progress.inbox);
  give_back_converted();
  if (auto& rows = exchange_.progress.row_result) links_.pool->give_back(std::move(rows->memory));
  // An assignment has no answer. The next operation must use the same flows to stay behind it.
  if (!std::holds_alternative<Assign>(exchange_.operation)) exchange_.priority = links_.priorities.of(unit().id);
  Inbox early = std::holds_alternative<Push>(operation) ? take_inbox() : Inbox();
  const bool came_early = std::holds_alternative<PeerInbox>(early);
  const bool came_from_host = std::holds_alternative<HostInbox>(early);
  exchange_.begin(std::move(operation), protocol_for(exchange_.about, next_scheme_), next_scheme_, std::move(early));
  note(FlightEvent::Kind::start);
  const auto refuse = [this](const std::string& sent) {
    fail({ErrorCode::mismatch,
          concat(sent, " in step ", exchange_.step, ", which takes scheme ", scheme_name(exchange_.outcome.scheme),
                 " here; give the layer the same scheme on all ranks")});
  };
  if (!exchange_.protocol->traits().uses_peers && came_early) return refuse("a peer has sent factors");
  if (came_from_host && !exchange_.protocol->traits().reduces_by_host)
    return refuse("a worker of this machine has sent its gradient");
  exchange_.protocol->start(exchange_, links_);
}

Status Syncer::unexpected(const std::string& what) const {
  return {ErrorCode::mismatch, what + " for '" + unit().name + "', which takes " +
                                   std::string(scheme_name(exchange_.outcome.scheme)) + " in this step"};
}

Status Syncer::check_step(const wire::Header& header) const {
  // A peer can be one step ahead but not two, because it needs this worker's part to end a step.
  const std::uint64_t current = exchange_.step;
  const bool expected = exchange_.progress.running && header.step == current;
  if (expected || header.step == current + 1) return {};
  return {ErrorCode::mismatch, concat(wire::kind_name(header.kind), " of step ", header.step, " came in step ", current,
                                      " of '", unit().name, "'; let all ranks exchange it equally often")};
}

Result<std::span<std::byte>> Syncer::accept(const wire::Header& header, bool lent) {
  one_thread_.check();
  const SchemeTraits& traits = exchange_.protocol->traits();
  if (exchange_.progress.running && !exchange_.progress.status.ok()) return exchange_.progress.status;
  if (!is_from_peer(header)) {
    if (!traits.uses_servers) return unexpected("a server's result");
    return exchange_.protocol->accept(exchange_, header, lent, links_);
  }
  if (Status status = check_step(header); !status.ok()) return status;
  if (header.step == exchange_.step) {
    if (!(is_local(header) ? traits.reduces_by_host : traits.uses_peers))
      return unexpected(wire::kind_name(header.kind));
    return exchange_.protocol->accept(exchange_, header, lent, links_);
  }
  if (header.kind == wire::Kind::local_result) return unexpected("a result of the next step");
  Inbox& inbox = early_.try_emplace(header.step).first->second;
  if (is_local(header)) return make_room_early<HostInbox>(inbox, header, host_reduction());
  return make_room_early<PeerInbox>(inbox, header, peer_broadcast_of(header.kind));
}

/// Makes room for a part of the next step, whose other parts have come for the same kind of inbox.
template <typename Kind, typename Protocol>
Result<std::span<std::byte>> Syncer::make_room_early(Inbox& inbox, const wire::Header& header,
                                                     const Protocol& protocol) {
  if (std::holds_alternative<std::monostate>(inbox)) inbox.emplace<Kind>();
  Kind* const own = std::get_if<Kind>(&inbox);
  if (own == nullptr)
    return Status(ErrorCode::mismatch, concat(wire::kind_name(header.kind), " came after parts of another scheme for '",
                                              unit().name, "'; give the layer the same scheme on all ranks"));
  return protocol.make_room(*own, exchange_, header, links_);
}

Status Syncer::on_message(const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  const bool from_peer = is_from_peer(header);
  const bool early = from_peer && header.step != exchange_.step;
  if (header.kind == wire::Kind::result)
    if (PushWindow* const window = links_.window_of(unit().chunks[header.chunk]))
      window->answered({header.unit, header.chunk});
  if (!early) return exchange_.protocol->receive(exchange_, header, payload, links_);
  const auto found = early_.find(header.step);
  invariant(found != early_.end(), "a part that completes was accepted");
  if (auto* const of_peers = std::get_if<PeerInbox>(&found->second))
    return peer_broadcast_of(header.kind).store(*of_peers, exchange_, header, payload, links_);
  host_reduction().store(std::get<HostInbox>(found->second), header, payload, links_);
  return {};
}

void Syncer::fail(const Status& status) {
  one_thread_.check();
  if (!exchange_.progress.status.ok()) return;
  exchange_.progress.status = status;
  exchange_.complete_if_done();
}

std::string Syncer::waiting_for() const {
  return goes_on() ? exchange_.protocol->waiting_for(exchange_, links_) : "ending";
}

bool Syncer::lacks(std::size_t peer) const {
  return goes_on() && exchange_.protocol->lacks(exchange_, links_, static_cast<std::uint32_t>(peer));
}

bool Syncer::lacks_part(std::size_t peer) const {
  return goes_on() && exchange_.protocol->lacks_part(exchange_, links_, static_cast<std::uint32_t>(peer));
}

void Syncer::finished() {
  invariant(!exchange_.progress.running, "an exchange that has ended does not run");
  note(FlightEvent::Kind::complete);
  if (exchange_.progress.status.ok())
    set_factor_count(exchange_.outcome.factor_count);
  else if (exchange_.protocol->traits().keeps_after_result)
    exchange_.kept = {};  // a part of it may be with the servers, whose result the other ranks have
  on_done_(*this);
  if (auto& answers = exchange_.progress.answers) {
    links_.pool->give_back(std::move(answers->group_result));
    for (Buffer& buffer : answers->staged) links_.pool->give_back(std::move(buffer));
  }
  // Gathered factors are read until the next start (Client::gathered), and this rank's own may lie in these buffers.
  const bool gathered = exchange_.protocol->traits().workers_multiply && exchange_.progress.result.empty();
  if (!gathered) give_back_converted();
}

void Syncer::give_back_converted() {
  for (Buffer& buffer : exchange_.progress.converted) links_.pool->give_back(std::move(buffer));
  exchange_.progress.converted.clear();
}

}  // namespace poseidon
