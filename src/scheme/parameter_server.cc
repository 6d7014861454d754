#include "scheme/parameter_server.h"

#include <algorithm>
#include <cstring>

namespace poseidon {

void ParameterServer::expect_results(Exchange& exchange) {
  exchange.chunks_missing = exchange.unit->chunks.size();
  exchange.chunk_received.assign(exchange.chunks_missing, false);
  exchange.received = exchange.chunks_missing == 0;
}

void ParameterServer::start(Exchange& exchange, const Links& links) const {
  expect_results(exchange);
  for (const Chunk& chunk : exchange.unit->chunks) {
    wire::Header header = header_for(exchange, links, wire::Kind::push);
    header.chunk = chunk.index;
    std::vector<std::span<const std::byte>> payload;
    if (!exchange.absent) payload.push_back(exchange.data.subspan(chunk.offset_bytes, chunk.size_bytes));
    const auto server = static_cast<std::size_t>(chunk.server);
    send_counted(exchange, *links.servers[server], !links.server_is_local[server], header, std::move(payload));
  }
  exchange.complete_if_done();  // a tensor without elements has no chunks to wait for
}

Result<std::span<std::byte>> ParameterServer::destination(Exchange& exchange, const wire::Header& header,
                                                          const Links&) const {
  if (!exchange.running || header.step != exchange.step || header.chunk >= exchange.unit->chunks.size() ||
      exchange.chunk_received[header.chunk])
    return Status(ErrorCode::mismatch, "a result nobody asked for: step " + std::to_string(header.step) + ", chunk " +
                                           std::to_string(header.chunk));
  const Chunk& chunk = exchange.unit->chunks[header.chunk];
  if (header.payload_bytes != chunk.size_bytes || header.dtype != exchange.unit->dtype)
    return Status(ErrorCode::mismatch, "the result of chunk " + std::to_string(header.chunk) + " has " +
                                           std::to_string(header.payload_bytes) + " bytes instead of " +
                                           std::to_string(chunk.size_bytes));
  return exchange.data.subspan(chunk.offset_bytes, chunk.size_bytes);
}

Status ParameterServer::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) const {
  const bool absent = (header.flags & wire::kAbsent) != 0;
  wire::Header expected = header;
  if (absent)
    expected.payload_bytes =
        header.chunk < exchange.unit->chunks.size() ? exchange.unit->chunks[header.chunk].size_bytes : 0;
  auto place = destination(exchange, expected, links);
  if (!place.ok()) return place.status();
  // A shard of this process lends its result instead of writing it here.
  if (!absent && payload.data() != place.value().data())
    std::memcpy(place.value().data(), payload.data(), payload.size());
  const auto server = static_cast<std::size_t>(exchange.unit->chunks[header.chunk].server);
  if (!links.server_is_local[server]) exchange.bytes_received += wire::kHeaderBytes + header.payload_bytes;
  exchange.chunk_received[header.chunk] = true;
  exchange.present = !absent;
  exchange.factor_count_sum = header.factor_count;
  exchange.received = --exchange.chunks_missing == 0;
  exchange.complete_if_done();
  return {};
}

std::string ParameterServer::waiting_for(const Exchange& exchange) const {
  const auto first = std::find(exchange.chunk_received.begin(), exchange.chunk_received.end(), false);
  if (first == exchange.chunk_received.end()) return "sending its push";
  const auto& chunk = exchange.unit->chunks[static_cast<std::size_t>(first - exchange.chunk_received.begin())];
  return "waiting for the result of chunk " + std::to_string(chunk.index) + " from server " +
         std::to_string(chunk.server) + " (" + std::to_string(exchange.chunks_missing) + " of " +
         std::to_string(exchange.unit->chunks.size()) + " chunks missing)";
}

}  // namespace poseidon
