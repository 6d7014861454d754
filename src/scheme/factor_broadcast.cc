#include "scheme/factor_broadcast.h"

#include <algorithm>
#include <cstring>

#include "scheme/conversion.h"

namespace poseidon {

namespace {

constexpr std::size_t kMinRowsPerJob = 64;

SchemeCost sfb_cost(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double factors = factor_count * (static_cast<double>(rows) + static_cast<double>(cols));
  const double cost = 2 * (cluster.worker_count - 1.0) * factors;
  return {cost, 0, cost};
}

/// Bytes of the dense gradient as it travels between workers.
std::size_t dense_bytes(const Unit& unit) {
  return array_bytes(unit.factor_dtype(), unit.size_bytes / dtype_bytes(unit.dtype));
}

void store_own(Exchange& exchange, const Links& links) {
  PeerInbox& inbox = exchange.progress.inbox;
  Part& part = inbox.parts[links.rank];
  part.arrived = true;
  part.factor_count = factor_count_of(exchange.push()->gradient);
  ++inbox.arrived_count;
  part.present = exchange.gradient<NoGradient>() == nullptr;
  if (const auto* dense = exchange.gradient<DenseGradient>()) {
    // The result is written to the memory of the gradient, perhaps while slow peers still receive it. So the dense
    // part, which is rare, is copied.
    const Unit& unit = exchange.unit();
    part.buffer = links.pool->take(dense_bytes(unit));
    if (unit.converts())
      kernel::encode(unit.factor_dtype(), reinterpret_cast<const float*>(dense->data.data()), part.buffer.data(),
                     unit.size_bytes / sizeof(float));
    else
      std::memcpy(part.buffer.data(), dense->data.data(), dense->data.size());
    kernel::FactorTerm term;
    term.dtype = unit.factor_dtype();
    term.dense = part.buffer.data();
    part.terms.push_back(term);
  }
  const auto* factored = exchange.gradient<FactoredGradient>();
  if (factored == nullptr) return;
  for (const auto& rows : factored->rows) {
    kernel::FactorTerm term;
    term.dtype = factored->dtype;
    term.left = rows.left;
    term.right = rows.right;
    term.count = rows.count;
    part.terms.push_back(term);
  }
}

/// Multiplies the parts, all of which are here, on the executor, or leaves them to the caller.
void finish(Exchange& exchange, const Links& links) {
  exchange.progress.received = true;
  std::uint64_t factor_count = 0;
  std::vector<kernel::FactorTerm> terms;
  for (const auto& part : exchange.progress.inbox.parts) {
    factor_count += part.factor_count;
    exchange.outcome.present = exchange.outcome.present || part.present;
    terms.insert(terms.end(), part.terms.begin(), part.terms.end());
  }
  exchange.outcome.factor_count = std::min<std::uint64_t>(factor_count, wire::kUnboundedFactors);
  if (!exchange.outcome.present || exchange.progress.result.empty()) return;
  exchange.progress.computing = true;
  const auto* factored = exchange.gradient<FactoredGradient>();
  const bool accumulate = factored != nullptr && factored->accumulate;
  const std::size_t job_count = std::clamp<std::size_t>(exchange.about.rows / kMinRowsPerJob, 1,
                                                        static_cast<std::size_t>(links.executor->thread_count()));
  links.executor->run(
      job_count,
      [&exchange, accumulate, job_count, terms = std::move(terms)](std::size_t job) {
        const std::size_t rows = exchange.about.rows;
        kernel::factor_product(terms, exchange.progress.result.data(), exchange.unit().dtype, rows, exchange.about.cols,
                               rows * job / job_count, rows * (job + 1) / job_count, exchange.push()->divisor,
                               accumulate);
      },
      [&exchange, &links] {
        links.loop->post([&exchange] {
          exchange.progress.computing = false;
          exchange.complete_if_done();
        });
      });
}

}  // namespace

FactorBroadcast::FactorBroadcast()
    : SchemeProtocol({
          .title = "sufficient factors",
          .summary = "Sufficient-factor broadcasting.",
          .takes_factors = true,
          .workers_multiply = true,
          .converts = true,
          .uses_peers = true,
          .automatic = true,
          .cost = sfb_cost,
      }) {}

const SchemeProtocol& sfb_scheme() {
  static const FactorBroadcast scheme;
  return scheme;
}

void FactorBroadcast::start(Exchange& exchange, const Links& links) const {
  PeerInbox& inbox = exchange.progress.inbox;
  inbox.parts.resize(links.worker_count);
  if (exchange.gradient<FactoredGradient>() != nullptr) convert_factors(exchange, links);
  store_own(exchange, links);
  wire::Contribution body = contribution_of(exchange, links, wire::Kind::factors);
  std::vector<std::span<const std::byte>> payload;
  if (const auto* factored = exchange.gradient<FactoredGradient>()) {
    body.dtype = factored->dtype;
    payload = factor_pieces(exchange.about, *factored);
  } else if (exchange.gradient<DenseGradient>() != nullptr) {
    body.dense = true;
    payload.push_back(inbox.parts[links.rank].buffer.span());
  }
  const wire::Header header = body.make();
  // Every worker starts after its own rank, which spreads the senders over the receivers' ports.
  for (std::uint32_t i = 1; i < links.worker_count; ++i) {
    Flow& flow = *links.peers[(links.rank + i) % links.worker_count][exchange.priority.priority_class];
    send_counted(exchange, links, flow, {FlightEvent::Party::peer, true}, header, payload);
  }
  if (exchange.progress.inbox.arrived_count == links.worker_count) finish(exchange, links);
  exchange.complete_if_done();
}

Result<std::span<std::byte>> FactorBroadcast::make_room(PeerInbox& inbox, const Exchange& exchange,
                                                        const wire::Header& header, const Links& links) {
  const auto refuse = [&header](const std::string& why) {
    return Status(ErrorCode::mismatch, "the factors of rank " + std::to_string(header.rank) + " " + why);
  };
  const auto body = wire::Contribution::read(header);
  if (body.rows != exchange.about.rows || body.cols != exchange.about.cols)
    return refuse("belong to a layer of another shape");
  inbox.parts.resize(links.worker_count);
  Part& part = inbox.parts[header.rank];
  // Until all of the part is here, the transport writes to its memory.
  if (part.accepted || part.arrived) return refuse("came twice");
  if (body.dense ? header.payload_bytes != dense_bytes(exchange.unit()) || body.dtype != exchange.unit().factor_dtype()
                 : header.payload_bytes != (body.absent ? 0 : body.factor_bytes()) || !dtype_is_floating(body.dtype) ||
                       dtype_bytes(body.dtype) > dtype_bytes(exchange.unit().dtype))
    return refuse("have a size or dtype that does not match their header");
  part.buffer = links.pool->try_take(header.payload_bytes);
  if (!part.buffer)
    return Status(ErrorCode::refused, "there is no memory left for the factors of rank " + std::to_string(header.rank) +
                                          ", " + std::to_string(header.payload_bytes) +
                                          " bytes; take smaller batches, or scheme=\"ps\" for this layer");
  part.accepted = true;
  ++inbox.accepted_count;
  return part.buffer.span();
}

void FactorBroadcast::store(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                            std::span<const std::byte> payload) {
  const auto body = wire::Contribution::read(header);
  Part& part = inbox.parts[header.rank];
  part.arrived = true;
  part.present = !body.absent;
  part.factor_count = body.factor_count;
  if (!payload.empty()) {
    if (payload.data() != part.buffer.data()) std::memcpy(part.buffer.data(), payload.data(), payload.size());
    kernel::FactorTerm term;
    term.dtype = body.dtype;
    if (body.dense) {
      term.dense = part.buffer.data();
    } else {
      term.left = part.buffer.data();
      term.right = term.left + std::size_t{body.factor_count} * exchange.about.rows * dtype_bytes(body.dtype);
      term.count = body.factor_count;
    }
    part.terms.push_back(term);
  }
  ++inbox.arrived_count;
}

Result<std::span<std::byte>> FactorBroadcast::accept(Exchange& exchange, const wire::Header& header, bool /*lent*/,
                                                     const Links& links) const {
  return make_room(exchange.progress.inbox, exchange, header, links);
}

Status FactorBroadcast::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) const {
  store(exchange.progress.inbox, exchange, header, payload);
  exchange.outcome.bytes_received += wire::kHeaderBytes + header.payload_bytes;
  if (exchange.progress.inbox.arrived_count == links.worker_count) finish(exchange, links);
  exchange.complete_if_done();
  return {};
}

std::string FactorBroadcast::waiting_for(const Exchange& exchange) const {
  std::string ranks;
  for (std::size_t rank = 0; rank < exchange.progress.inbox.parts.size(); ++rank)
    if (!exchange.progress.inbox.parts[rank].arrived) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks.empty() ? "sending or multiplying factors" : "waiting for the factors of rank " + ranks;
}

}  // namespace poseidon
