#include "scheme/parameter_server.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "wire/messages.h"

namespace poseidon {

void ParameterServer::expect_results(Exchange& exchange) {
  exchange.chunks_missing = exchange.unit->chunks.size();
  exchange.chunk_received.assign(exchange.chunks_missing, false);
  exchange.empty_chunks.clear();
  exchange.received = exchange.chunks_missing == 0;
  exchange.present = exchange.received && !exchange.absent;  // without elements there is nobody to ask
}

/// With stragglers=drop a step may have ended without the only worker that contributed, for some chunks and not for
/// others. All workers then have to take the same for the gradient of these.
void ParameterServer::clear_empty_chunks(const Exchange& exchange) {
  if (!exchange.present || exchange.stored || exchange.destination.empty()) return;
  for (const std::uint32_t index : exchange.empty_chunks) {
    const Chunk& chunk = exchange.unit->chunks[index];
    std::memset(exchange.destination.data() + chunk.offset_bytes, 0, chunk.size_bytes);
  }
}

/// A chunk's bytes, where they lie: in one piece, or in those of a group.
std::vector<std::span<const std::byte>> ParameterServer::payload_of(const Exchange& exchange, const Chunk& chunk) {
  if (exchange.pieces.empty()) return {exchange.data.subspan(chunk.offset_bytes, chunk.size_bytes)};
  const auto& offsets = exchange.unit->offsets_bytes;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  std::size_t piece = static_cast<std::size_t>(after - offsets.begin()) - 1;
  // The footer has no offset of its own: it follows the last member.
  std::size_t skip_bytes = chunk.offset_bytes - offsets[piece];
  if (skip_bytes >= exchange.pieces[piece].size()) skip_bytes -= exchange.pieces[piece++].size();
  std::vector<std::span<const std::byte>> payload;
  for (std::size_t left_bytes = chunk.size_bytes; left_bytes > 0; ++piece) {
    const auto rest = exchange.pieces[piece].subspan(skip_bytes);
    skip_bytes = 0;
    if (rest.empty()) continue;
    payload.push_back(rest.first(std::min(rest.size(), left_bytes)));
    left_bytes -= payload.back().size();
  }
  return payload;
}

/// Copies a chunk of a group's result to the members.
Status ParameterServer::scatter(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) {
  if (Status status = check_result(exchange, header); !status.ok()) return status;
  const Chunk& chunk = exchange.unit->chunks[header.chunk];
  const auto& offsets = exchange.unit->offsets_bytes;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  for (std::size_t member = static_cast<std::size_t>(after - offsets.begin()) - 1; member < offsets.size(); ++member) {
    const std::size_t begin = std::max(offsets[member], chunk.offset_bytes);
    const std::size_t end =
        std::min(offsets[member] + exchange.members[member].size(), chunk.offset_bytes + payload.size());
    if (offsets[member] >= chunk.offset_bytes + payload.size()) break;
    if (begin >= end) continue;
    std::memcpy(exchange.members[member].data() + (begin - offsets[member]),
                payload.data() + (begin - chunk.offset_bytes), end - begin);
  }
  if (header.chunk < exchange.member_chunks.size())
    links.pool->give_back(std::move(exchange.member_chunks[header.chunk]));
  return {};
}

void ParameterServer::send_rule(Exchange& exchange, const Links& links) {
  wire::Header about = header_for(exchange, links, wire::Kind::rule);
  const wire::TextMessage message = wire::make_rule(about, *exchange.rule);
  std::set<Flow*> told;  // each flow once: the rule has to be there before the chunks that follow on it
  for (const Chunk& chunk : exchange.unit->chunks) {
    Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
    if (!told.insert(&flow).second) continue;
    flow.send(message.header, {message.payload()}, [text = message.text](const Status&) {});
  }
  exchange.rule.reset();
}

void ParameterServer::start(Exchange& exchange, const Links& links) const {
  expect_results(exchange);
  if (exchange.rule) send_rule(exchange, links);
  const Operation operation = exchange.operation;
  const wire::Kind kind = only_receives(operation)         ? wire::Kind::pull
                          : operation == Operation::assign ? wire::Kind::assign
                                                           : wire::Kind::push;
  for (const Chunk& chunk : exchange.unit->chunks) {
    wire::Header header = header_for(exchange, links, kind);
    header.chunk = chunk.index;
    header.rows = exchange.array;
    if (operation == Operation::assign) header.step = exchange.update_count;
    if (operation == Operation::restore) header.step = exchange.version_limit;
    std::vector<std::span<const std::byte>> payload;
    if (!exchange.absent && !only_receives(operation)) payload = payload_of(exchange, chunk);
    Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
    send_counted(exchange, links, flow, !links.is_local(chunk), header, std::move(payload));
  }
  if (operation == Operation::assign) exchange.received = true;  // no answer; what follows on a flow comes after it
  exchange.complete_if_done();                                   // a tensor without elements has no chunks to wait for
}

/// Whether a message is an answer that the exchange waits for, of the right size and type.
Status ParameterServer::check_result(const Exchange& exchange, const wire::Header& header) {
  const bool pulls = only_receives(exchange.operation);
  const bool expected = pulls ? header.kind == wire::Kind::value && header.rows == exchange.array
                              : header.kind == wire::Kind::result && header.step == exchange.step;
  if (!exchange.running || !expected || header.chunk >= exchange.unit->chunks.size() ||
      exchange.chunk_received[header.chunk])
    return Status(ErrorCode::mismatch, "a result nobody asked for: step " + std::to_string(header.step) + ", chunk " +
                                           std::to_string(header.chunk));
  const Chunk& chunk = exchange.unit->chunks[header.chunk];
  const std::size_t size_bytes = exchange.operation == Operation::push ? 0 : chunk.size_bytes;
  if (header.payload_bytes != size_bytes || header.dtype != exchange.unit->dtype)
    return Status(ErrorCode::mismatch, "the result of chunk " + std::to_string(header.chunk) + " has " +
                                           std::to_string(header.payload_bytes) + " bytes instead of " +
                                           std::to_string(size_bytes));
  return {};
}

/// Which versions of a checkpoint the chunks come from.
void ParameterServer::note_version(Exchange& exchange, const wire::Header& header) {
  if (exchange.operation != Operation::restore) return;
  const bool first = exchange.chunks_missing == exchange.unit->chunks.size();
  exchange.oldest_version = first ? header.cols : std::min<std::uint64_t>(exchange.oldest_version, header.cols);
  exchange.newest_version = first ? header.cols : std::max<std::uint64_t>(exchange.newest_version, header.cols);
}

Result<std::span<std::byte>> ParameterServer::destination(Exchange& exchange, const wire::Header& header,
                                                          const Links& links) const {
  if (Status status = check_result(exchange, header); !status.ok()) return status;
  const Chunk& chunk = exchange.unit->chunks[header.chunk];
  if (!exchange.members.empty()) {
    exchange.member_chunks.resize(exchange.unit->chunks.size());
    Buffer& buffer = exchange.member_chunks[header.chunk];
    if (!buffer) buffer = links.pool->take(chunk.size_bytes);
    return buffer.span();
  }
  if (!exchange.pieces.empty() && !exchange.group_result) {
    exchange.group_result = links.pool->take(exchange.unit->size_bytes);
    exchange.destination = exchange.group_result.span();
  }
  if (exchange.operation == Operation::push) return std::span<std::byte>();
  return exchange.destination.subspan(chunk.offset_bytes, chunk.size_bytes);
}

Status ParameterServer::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) const {
  const bool absent = (header.flags & wire::kAbsent) != 0;
  wire::Header expected = header;
  if (absent && payload.empty() && exchange.operation != Operation::push)
    expected.payload_bytes =
        header.chunk < exchange.unit->chunks.size() ? exchange.unit->chunks[header.chunk].size_bytes : 0;
  if (exchange.members.empty()) {
    auto place = destination(exchange, expected, links);
    if (!place.ok()) return place.status();
    // A shard of this process lends its result instead of writing it here.
    if (!payload.empty() && payload.data() != place.value().data())
      std::memcpy(place.value().data(), payload.data(), payload.size());
  } else if (Status status = scatter(exchange, expected, payload, links); !status.ok()) {
    return status;
  }
  if (!links.is_local(exchange.unit->chunks[header.chunk]))
    exchange.bytes_received += wire::kHeaderBytes + header.payload_bytes;
  exchange.chunk_received[header.chunk] = true;
  note_version(exchange, header);
  if ((header.flags & wire::kLate) != 0) {
    ++exchange.late_chunks;
    exchange.behind = std::max(exchange.behind, std::min(header.rows, wire::kMostStragglerSteps));
  }
  exchange.present = exchange.present || !absent;
  if (absent) exchange.empty_chunks.push_back(header.chunk);
  exchange.factor_count_sum = header.factor_count;
  // Chunks may have been updated in different steps (stragglers=drop).
  if (only_receives(exchange.operation)) exchange.update_count = std::max(exchange.update_count, header.step);
  exchange.received = --exchange.chunks_missing == 0;
  if (exchange.received) clear_empty_chunks(exchange);
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
