#include "scheme/peer_broadcast.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/invariant.h"
#include "poseidon/plan.h"

namespace poseidon {

namespace {

constexpr const char* kSameScheme = "; give the layer the same scheme on all ranks";

/// Bytes of the dense gradient as it travels between workers.
std::size_t dense_bytes(const Unit& unit) {
  return array_bytes(unit.factor_dtype, unit.size_bytes / dtype_bytes(unit.dtype));
}

/// Counts what has come over the network.
void count_received(Exchange& exchange, const Links& links, std::uint32_t rank, std::size_t payload_bytes) {
  if (links.hosts.crosses(links.hosts.source_of(links.rank, rank), links.rank))
    exchange.outcome.bytes_received += wire::kHeaderBytes + payload_bytes;
}

/// The result is written to the memory of the gradient, perhaps while slow peers still receive it. So the dense part,
/// which is rare, is copied.
Buffer dense_copy(const Unit& unit, std::span<const std::byte> gradient, const Links& links) {
  invariant(gradient.size() == unit.size_bytes, "a dense gradient has its unit's size");
  Buffer copy = links.pool->take(dense_bytes(unit));
  if (unit.converts_factors())
    kernel::encode(unit.factor_dtype, reinterpret_cast<const float*>(gradient.data()), copy.data(),
                   unit.size_bytes / sizeof(float));
  else
    std::memcpy(copy.data(), gradient.data(), gradient.size());
  return copy;
}

}  // namespace

void PeerBroadcast::start(Exchange& exchange, const Links& links) const {
  if (!std::holds_alternative<PeerInbox>(exchange.progress.inbox)) exchange.progress.inbox.emplace<PeerInbox>();
  PeerInbox& inbox = exchange.progress.inbox_of<PeerInbox>();
  if (inbox.kind != wire::Kind::none && inbox.kind != kind_) {
    exchange.progress.status = {ErrorCode::mismatch,
                                concat("a peer has sent ", wire::kind_name(inbox.kind), " in step ", exchange.step,
                                       ", which takes ", wire::kind_name(kind_), " here", kSameScheme)};
    return exchange.complete_if_done();
  }
  inbox.parts.resize(links.worker_count);
  for (std::uint32_t rank = 0; rank < inbox.parts.size(); ++rank)
    if (inbox.parts[rank].arrived) count_received(exchange, links, rank, inbox.parts[rank].buffer.size());
  Part& own = inbox.parts[links.rank];
  own.factor_count = factor_count_of(exchange.push()->gradient);
  own.present = exchange.gradient<NoGradient>() == nullptr;
  if (own.present) return send_own(exchange, links, own);
  send_part(exchange, links, contribution_of(exchange, links, kind_), {});
}

void PeerBroadcast::send_part(Exchange& exchange, const Links& links, const wire::Contribution& body,
                              const Pieces& payload) const {
  PeerInbox& inbox = exchange.progress.inbox_of<PeerInbox>();
  invariant(!inbox.parts[links.rank].arrived, "a worker contributes once to a step");
  inbox.parts[links.rank].arrived = true;
  ++inbox.arrived_count;
  exchange.progress.contributing = false;
  const wire::Header header = body.make();
  // Every worker starts after its own rank, which spreads the senders over the receivers' ports.
  for (std::uint32_t i = 1; i < links.worker_count; ++i) {
    const std::uint32_t rank = (links.rank + i) % links.worker_count;
    if (links.hosts.source_of(rank, links.rank) != links.rank) continue;
    Flow* const flow = links.peers[rank][exchange.priority.priority_class];
    if (flow == nullptr) continue;  // it has left, and needs nothing any more
    const bool crosses_network = links.hosts.crosses(links.rank, rank);
    send_counted(exchange, links, *flow, {FlightEvent::Party::peer, crosses_network}, header, payload);
  }
  finish_if_complete(exchange, links);
}

void ExactBroadcast::send_own(Exchange& exchange, const Links& links, Part& own) const {
  wire::Contribution body = contribution_of(exchange, links, kind());
  Pieces payload;
  if (const auto* dense = exchange.gradient<DenseGradient>()) {
    body.dense = true;
    own.buffer = dense_copy(exchange.unit(), dense->data, links);
    payload.push_back(own.buffer.span());
    exchange.progress.status = read_part(exchange, body, own);
  } else {
    payload = make_part(exchange, links, own, body);
  }
  send_part(exchange, links, body, payload);
}

void CompressedBroadcast::send_own(Exchange& exchange, const Links& links, Part& own) const {
  const wire::Contribution body = contribution_of(exchange, links, kind());
  exchange.progress.contributing = true;
  own.buffer = links.pool->take(part_bytes(exchange, body).value());
  const auto* const gradient = reinterpret_cast<const float*>(exchange.gradient<DenseGradient>()->data.data());
  auto* const residual = reinterpret_cast<float*>(exchange.kept.memory_of(kept_count(*exchange.about.layer)).data());
  compute(
      exchange, links, 1,
      [this, &exchange, &own, gradient, residual](std::size_t) {
        compress(exchange.about, gradient, residual, own.buffer.span());
      },
      [this, &exchange, &links, &own, body] {
        exchange.progress.status = read_part(exchange, body, own);
        send_part(exchange, links, body, {own.buffer.span()});
      });
}

Result<std::span<std::byte>> PeerBroadcast::make_room(PeerInbox& inbox, const Exchange& exchange,
                                                      const wire::Header& header, const Links& links) const {
  const std::string rank = std::to_string(header.rank);
  const std::string what = wire::kind_name(kind_);
  const auto refuse = [&](const std::string& why) {
    return Status(ErrorCode::mismatch, "the " + what + " of rank " + rank + " " + why);
  };
  const auto body = wire::Contribution::read(header);
  if (header.kind != kind_) return refuse(std::string("came as ") + wire::kind_name(header.kind) + kSameScheme);
  if (inbox.kind != wire::Kind::none && inbox.kind != kind_)
    return refuse(std::string("came after another rank's ") + wire::kind_name(inbox.kind) + kSameScheme);
  if (body.rows != exchange.about.rows || body.cols != exchange.about.cols)
    return refuse("belong to a layer of another shape; build the same model on all ranks");
  inbox.kind = kind_;
  inbox.parts.resize(links.worker_count);
  Part& part = inbox.parts[header.rank];
  // Until all of the part is here, the transport writes to its memory.
  if (part.accepted || part.arrived) return refuse("came twice");
  const Unit& unit = exchange.unit();
  const bool fits = body.dense ? header.payload_bytes == dense_bytes(unit) && body.dtype == unit.factor_dtype
                               : header.payload_bytes == (body.absent ? 0 : part_bytes(exchange, body));
  if (!fits) return refuse("have a size or dtype that does not match their header");
  part.buffer = links.pool->try_take(header.payload_bytes);
  if (!part.buffer)
    return Status(ErrorCode::refused,
                  concat("there is no memory left for the ", what, " of rank ", rank, ", ", header.payload_bytes,
                         " bytes; take smaller batches, or scheme=\"ps\" for this layer"));
  part.accepted = true;
  return part.buffer.span();
}

Status PeerBroadcast::store(PeerInbox& inbox, Exchange& exchange, const wire::Header& header,
                            std::span<const std::byte> payload, const Links& links) const {
  const auto body = wire::Contribution::read(header);
  Part& part = inbox.parts[header.rank];
  invariant(part.accepted && !part.arrived && payload.size() <= part.buffer.size(),
            "a part completes once, in the memory that it was given");
  part.arrived = true;
  part.present = !body.absent;
  part.factor_count = body.factor_count;
  ++inbox.arrived_count;
  if (!payload.empty() && payload.data() != part.buffer.data())
    std::memcpy(part.buffer.data(), payload.data(), payload.size());
  pass_on(inbox, exchange, header, links);
  if (payload.empty()) return {};
  return read_part(exchange, body, part);
}

Result<std::span<std::byte>> PeerBroadcast::accept(Exchange& exchange, const wire::Header& header, bool /*lent*/,
                                                   const Links& links) const {
  return make_room(exchange.progress.inbox_of<PeerInbox>(), exchange, header, links);
}

Status PeerBroadcast::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                              const Links& links) const {
  PeerInbox& inbox = exchange.progress.inbox_of<PeerInbox>();
  if (Status status = store(inbox, exchange, header, payload, links); !status.ok()) return status;
  count_received(exchange, links, header.rank, header.payload_bytes);
  finish_if_complete(exchange, links);
  return {};
}

/// Gives what has come from another machine or rack to the other workers of this one.
void PeerBroadcast::pass_on(PeerInbox& inbox, Exchange& exchange, const wire::Header& header, const Links& links) {
  const Hosts& hosts = links.hosts;
  if (!hosts.together() || hosts.share_host(header.rank, links.rank)) return;
  Pieces payload;
  if (header.payload_bytes > 0) payload.push_back(inbox.parts[header.rank].buffer.span().first(header.payload_bytes));
  for (const std::uint32_t rank : hosts.rack_mates_of(links.rank)) {
    if (rank == links.rank || hosts.source_of(rank, header.rank) != links.rank) continue;
    Flow* const flow = links.peers[rank][exchange.priority.priority_class];
    if (flow == nullptr) continue;  // it has left, and needs nothing any more
    if (hosts.crosses(links.rank, rank)) inbox.passed_on_bytes += wire::kHeaderBytes + header.payload_bytes;
    ++exchange.passed_on_pending;
    flow->send(header, payload, [&exchange](const Status&) {
      invariant(exchange.passed_on_pending > 0, "a part is passed on once to each worker");
      --exchange.passed_on_pending;
      exchange.complete_if_done();
    });
  }
}

void PeerBroadcast::finish_if_complete(Exchange& exchange, const Links& links) const {
  const PeerInbox& inbox = exchange.progress.inbox_of<PeerInbox>();
  invariant(inbox.arrived_count <= links.worker_count, "no more parts arrive than there are workers");
  if (inbox.arrived_count == links.worker_count) {
    exchange.progress.received = true;
    exchange.outcome.bytes_sent += inbox.passed_on_bytes;
    std::uint64_t factor_count = 0;
    for (const Part& part : inbox.parts) {
      factor_count += part.factor_count;
      exchange.outcome.present = exchange.outcome.present || part.present;
    }
    exchange.outcome.factor_count = std::min<std::uint64_t>(factor_count, wire::kUnboundedFactors);
    if (exchange.outcome.present) finish(exchange, links);
  }
  exchange.complete_if_done();
}

/// What comes through a gate may come after the peer's goodbye. If it does not come at all, the gate tells.
bool PeerBroadcast::lacks(const Exchange& exchange, const Links& links, std::uint32_t peer) const {
  if (links.hosts.source_of(links.rank, peer) != peer || exchange.progress.received) return false;
  const auto& parts = exchange.progress.inbox_of<PeerInbox>().parts;
  return peer < parts.size() && !parts[peer].arrived;
}

std::string PeerBroadcast::waiting_for(const Exchange& exchange, const Links& /*links*/) const {
  std::string ranks;
  const auto& parts = exchange.progress.inbox_of<PeerInbox>().parts;
  for (std::size_t rank = 0; rank < parts.size(); ++rank)
    if (!parts[rank].arrived) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  const std::string what = wire::kind_name(kind_);
  return ranks.empty() ? "sending or adding up " + what : "waiting for the " + what + " of rank " + ranks;
}

void compute(Exchange& exchange, const Links& links, std::size_t job_count, std::function<void(std::size_t)> job,
             std::function<void()> then) {
  exchange.progress.computing = true;
  links.executor->run(job_count, std::move(job), [&exchange, &links, begun_ns = now_ns(), then = std::move(then)] {
    links.loop->post([&exchange, begun_ns, then] {
      exchange.outcome.compute_ns = now_ns() - begun_ns;
      exchange.progress.computing = false;
      if (exchange.progress.status.ok()) then();
      exchange.complete_if_done();
    });
  });
}

void compute_ranges(Exchange& exchange, const Links& links, std::size_t most_jobs, std::size_t count,
                    std::function<void(std::size_t begin, std::size_t end)> work, std::function<void()> then) {
  const auto jobs = std::clamp<std::size_t>(most_jobs, 1, static_cast<std::size_t>(links.executor->thread_count()));
  const auto job = [count, jobs, work = std::move(work)](std::size_t i) {
    work(count * i / jobs, count * (i + 1) / jobs);
  };
  compute(exchange, links, jobs, job, std::move(then));
}

const PeerBroadcast& peer_broadcast_of(wire::Kind kind) {
  for (const Scheme scheme : all_schemes()) {
    const SchemeProtocol& protocol = protocol_of(scheme);
    if (!protocol.traits().uses_peers) continue;
    if (const auto& peers = static_cast<const PeerBroadcast&>(protocol); peers.kind() == kind) return peers;
  }
  break_down("each kind of message that peers exchange has a scheme (kinds.def)");
}

}  // namespace poseidon
