#include "scheme/adam.h"

namespace poseidon {

void Adam::start(Exchange& exchange, const Links& links) const {
  const auto* factored = exchange.gradient<FactoredGradient>();
  if (factored == nullptr) return ParameterServer::start(exchange, links);
  expect_results(exchange);
  const Chunk& whole = exchange.unit().chunks.front();  // the plan gives an adam layer one chunk
  wire::Header header = header_for(exchange, links, wire::Kind::factors);
  header.rows = static_cast<std::uint32_t>(exchange.about.rows);
  header.cols = static_cast<std::uint32_t>(exchange.about.cols);
  Flow& flow = links.flow_of(whole, exchange.priority.priority_class);
  send_counted(exchange, links, flow, !links.is_local(whole), header, factor_pieces(exchange.about, *factored));
}

}  // namespace poseidon
