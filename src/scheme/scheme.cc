#include "scheme/scheme.h"

#include <array>

#include "scheme/host_reduction.h"

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

const SchemeProtocol& protocol_for(const ExchangeUnit& about, Scheme scheme) {
  const SchemeProtocol& own = protocol_of(scheme);
  return about.by_host && own.traits().reduces_by_host ? host_reduction() : own;
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

wire::Envelope envelope_of(const Exchange& exchange, const Links& links) {
  wire::Envelope about;
  about.rank = links.rank;
  about.unit = exchange.unit().id;
  about.step = exchange.step;
  about.priority = exchange.priority.level;
  return about;
}

wire::Contribution contribution_of(const Exchange& exchange, const Links& links, wire::Kind kind) {
  wire::Contribution body(kind, envelope_of(exchange, links));
  invariant(exchange.push() != nullptr, "only a push contributes to a step");
  const Push& push = *exchange.push();
  const bool has_factor_dtype = kind == wire::Kind::factors || kind == wire::Kind::rows;
  body.dtype = has_factor_dtype ? exchange.unit().factor_dtype : exchange.unit().wire_dtype;
  body.absent = std::holds_alternative<NoGradient>(push.gradient);
  body.transient = exchange.about.transient;
  body.stored = exchange.about.stored;
  const Unit& unit = exchange.unit();
  const bool keeps_float32 = body.stored && unit.value_dtype == DType::float32;
  body.float32_value = keeps_float32 && unit.wire_dtype != DType::float32;
  body.as_bfloat16 = keeps_float32 && exchange.result_dtype() == DType::bfloat16;
  body.wants_result = push.wants_result;
  body.excluded_from_mean = push.excluded_from_mean && !exchange.about.transient;
  body.worker_count = links.worker_count;
  body.divisor = push.divisor;
  body.rule_digest = push.rule_digest;
  body.factor_count = factor_count_of(push.gradient);
  if (kind != wire::Kind::push) {
    body.rows = static_cast<std::uint32_t>(exchange.about.rows);
    body.cols = static_cast<std::uint32_t>(exchange.about.cols);
  }
  return body;
}

void send_counted(Exchange& exchange, const Links& links, Flow& flow, Receiving to, const wire::Header& header,
                  Pieces payload) {
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
    invariant(exchange.progress.sends_pending > 0, "a send is done once, before its exchange ends");
    // A failed send also closes its flow. That fails the exchange with the better message.
    --exchange.progress.sends_pending;
    exchange.complete_if_done();
  });
}

void send_to_server(Exchange& exchange, const Links& links, const Chunk& chunk, const wire::Header& header,
                    Pieces payload) {
  const auto send = [&exchange, &links, &chunk, header](Pieces pieces) {
    Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
    send_counted(exchange, links, flow, {FlightEvent::Party::server, !links.is_local(chunk)}, header,
                 std::move(pieces));
  };
  // Only a step has results. Values that are set or asked for do not wait. Nor does what somebody waits for: a barrier,
  // which other ranks may have started before what fills their windows, and a later round of powersgd.
  PushWindow* const window = links.window_of(chunk);
  if (window == nullptr || exchange.push() == nullptr || exchange.about.transient || exchange.progress.round > 0)
    return send(std::move(payload));
  std::size_t size_bytes = wire::kHeaderBytes;
  for (const auto& piece : payload) size_bytes += piece.size();
  ++exchange.progress.sends_pending;
  window->push({header.unit, chunk.index}, exchange.priority.level, size_bytes,
               [&exchange, send, pieces = std::move(payload)](bool go) mutable {
                 invariant(exchange.progress.sends_pending > 0, "a push leaves its window once");
                 if (go) send(std::move(pieces));
                 --exchange.progress.sends_pending;
                 exchange.complete_if_done();
               });
}

Pieces factor_pieces(const ExchangeUnit& about, const FactoredGradient& factored) {
  const std::size_t element_bytes = dtype_bytes(factored.dtype);
  Pieces pieces;
  for (const auto& rows : factored.rows)
    if (rows.count > 0) pieces.emplace_back(rows.left, rows.count * about.rows * element_bytes);
  for (const auto& rows : factored.rows)
    if (rows.count > 0) pieces.emplace_back(rows.right, rows.count * about.cols * element_bytes);
  return pieces;
}

}  // namespace poseidon
