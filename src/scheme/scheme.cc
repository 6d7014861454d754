#include "scheme/scheme.h"

#include <array>

namespace poseidon {

#define POSEIDON_SCHEME(name) const SchemeProtocol& name##_scheme();
#include "poseidon/schemes.def"
#undef POSEIDON_SCHEME

const SchemeProtocol& protocol_of(Scheme scheme) {
  static const std::array protocols{
#define POSEIDON_SCHEME(name) &name##_scheme(),
#include "poseidon/schemes.def"
#undef POSEIDON_SCHEME
  };
  return *protocols.at(static_cast<std::size_t>(scheme) - 1);  // Scheme::automatic is 0
}

const SchemeTraits& traits_of(Scheme scheme) { return protocol_of(scheme).traits(); }

std::span<const Scheme> all_schemes() {
  static constexpr std::array all{
#define POSEIDON_SCHEME(name) Scheme::name,
#include "poseidon/schemes.def"
#undef POSEIDON_SCHEME
  };
  return all;
}

namespace {

std::uint8_t flags_of(const Exchange& exchange) {
  int flags = (exchange.about.transient ? wire::kTransient : 0) | (exchange.about.stored ? wire::kStored : 0);
  if (const Push* push = exchange.push()) {
    flags |= std::holds_alternative<NoGradient>(push->gradient) ? wire::kAbsent : 0;
    flags |= push->wants_result ? 0 : wire::kNoResult;
    flags |= push->excluded_from_mean && !exchange.about.transient ? wire::kLate : 0;
  }
  return static_cast<std::uint8_t>(flags);
}

}  // namespace

wire::Header header_for(const Exchange& exchange, const Links& links, wire::Kind kind) {
  wire::Header header;
  header.kind = kind;
  header.dtype = exchange.unit().dtype;
  header.flags = flags_of(exchange);
  header.rank = links.rank;
  header.worker_count = links.worker_count;
  header.unit = exchange.unit().id;
  header.step = exchange.step;
  if (const Push* push = exchange.push()) {
    header.divisor = push->divisor;
    header.factor_count = factor_count_of(push->gradient);
  }
  header.priority = exchange.priority.level;
  return header;
}

void send_counted(Exchange& exchange, const Links& links, Flow& flow, Receiving to, const wire::Header& header,
                  std::vector<std::span<const std::byte>> payload) {
  FlightEvent event;
  event.kind = FlightEvent::Kind::sent;
  event.what = wire::kind_name(header.kind);
  event.party = to.party;
  event.index = static_cast<std::uint32_t>(flow.tag);
  event.unit = header.unit;
  event.chunk = header.chunk;
  event.step = header.step;
  for (const auto& piece : payload) event.bytes += piece.size();
  links.recorder->note(event);
  if (to.crosses_network) exchange.outcome.bytes_sent += wire::kHeaderBytes + event.bytes;
  ++exchange.progress.sends_pending;
  flow.send(header, std::move(payload), [&exchange](const Status&) {
    // A failed send also closes its flow. That fails the exchange with the better message.
    --exchange.progress.sends_pending;
    exchange.complete_if_done();
  });
}

void send_to_server(Exchange& exchange, const Links& links, const Chunk& chunk, const wire::Header& header,
                    std::vector<std::span<const std::byte>> payload) {
  Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
  send_counted(exchange, links, flow, {FlightEvent::Party::server, !links.is_local(chunk)}, header, std::move(payload));
}

std::vector<std::span<const std::byte>> factor_pieces(const ExchangeUnit& about, const FactoredGradient& factored) {
  const std::size_t element_bytes = dtype_bytes(factored.dtype);
  std::vector<std::span<const std::byte>> pieces;
  for (const auto& rows : factored.rows)
    if (rows.count > 0) pieces.emplace_back(rows.left, rows.count * about.rows * element_bytes);
  for (const auto& rows : factored.rows)
    if (rows.count > 0) pieces.emplace_back(rows.right, rows.count * about.cols * element_bytes);
  return pieces;
}

}  // namespace poseidon
