#include "scheme/parameter_server.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "scheme/conversion.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"
#include "wire/pace.h"

namespace poseidon {

namespace {

SchemeCost ps_cost(std::size_t rows, std::size_t cols, double, const Cluster& cluster) {
  const double workers = cluster.worker_count;
  const double servers = cluster.server_count;
  const double dense = static_cast<double>(rows) * static_cast<double>(cols);
  // A colocated shard exchanges its own worker's data in memory.
  return {2 * dense, 2 * workers * dense / servers, 2 * dense * (workers + servers - 2) / servers};
}

/// The fields that a result and a value have in common.
struct Answer {
  explicit Answer(const wire::Header& header) {
    if (header.kind == wire::Kind::result) {
      const auto result = wire::StepResult::read(header);
      dtype = result.dtype;
      absent = result.absent;
    } else {
      const auto value = wire::Value::read(header);
      dtype = value.dtype;
      absent = value.absent;
    }
  }
  DType dtype = DType::float32;
  bool absent = false;
};

/// Whether the answers carry a payload.
bool wants_result(const Exchange& exchange) { return exchange.push() == nullptr || exchange.push()->wants_result; }

/// The type of the answers: that of the unit, unless they are the result of a step.
DType answer_dtype(const Exchange& exchange) {
  return exchange.push() == nullptr ? exchange.unit().dtype : exchange.unit().result_dtype;
}

/// Whether answers have another type than the unit.
bool decodes(const Exchange& exchange) { return answer_dtype(exchange) != exchange.unit().dtype; }

/// Returns where the result of a chunk is written.
std::span<std::byte> place_of(const Exchange& exchange, const Chunk& chunk) {
  return exchange.progress.result.subspan(chunk.offset_bytes, chunk.size_bytes);
}

/// Whether a group's result is copied to its members chunk by chunk.
bool scatters(const Exchange& exchange) {
  const auto* group = exchange.gradient<GroupedGradients>();
  return group != nullptr && !group->members.empty();
}

}  // namespace

/// Marks every chunk as awaited.
void ParameterServer::expect_results(Exchange& exchange) {
  Progress& progress = exchange.progress;
  progress.chunks_missing = exchange.unit().chunks.size();
  progress.chunks.resize(progress.chunks_missing, ChunkArrival::awaited);
  progress.received = progress.chunks_missing == 0;
  // A tensor without elements has no server to ask.
  exchange.outcome.present = progress.received && exchange.gradient<NoGradient>() == nullptr;
}

/// With stragglers=drop, a step may have ended without the only worker that contributed, for some chunks and not for
/// others. All workers then have to use the same values for these chunks.
void ParameterServer::clear_empty_chunks(const Exchange& exchange) {
  const Progress& progress = exchange.progress;
  if (!exchange.outcome.present || exchange.about.stored || progress.result.empty()) return;
  for (const std::uint32_t index : progress.empty_chunks) {
    const Chunk& chunk = exchange.unit().chunks[index];
    std::memset(progress.result.data() + chunk.offset_bytes, 0, chunk.size_bytes);
  }
}

/// Returns a chunk's bytes where they lie: in one piece, or in the pieces of a group.
std::vector<std::span<const std::byte>> ParameterServer::payload_of(const Exchange& exchange, const Chunk& chunk) {
  const auto* group = exchange.gradient<GroupedGradients>();
  if (group == nullptr) {
    const std::span<const std::byte> data = data_of(exchange.operation);
    if (data.empty()) return {};
    return {data.subspan(chunk.offset_bytes, chunk.size_bytes)};
  }
  const auto& pieces = group->pieces;
  const auto& offsets = exchange.unit().offsets_bytes;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  std::size_t piece = static_cast<std::size_t>(after - offsets.begin()) - 1;
  // The footer has no offset of its own, because it follows the last member.
  std::size_t skip_bytes = chunk.offset_bytes - offsets[piece];
  if (skip_bytes >= pieces[piece].size()) skip_bytes -= pieces[piece++].size();
  std::vector<std::span<const std::byte>> payload;
  for (std::size_t left_bytes = chunk.size_bytes; left_bytes > 0; ++piece) {
    const auto rest = pieces[piece].subspan(skip_bytes);
    skip_bytes = 0;
    if (rest.empty()) continue;
    payload.push_back(rest.first(std::min(rest.size(), left_bytes)));
    left_bytes -= payload.back().size();
  }
  return payload;
}

/// Copies a chunk of a group's result to the members.
void ParameterServer::scatter(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                              const Links& links) {
  const Chunk& chunk = exchange.unit().chunks[header.chunk];
  Buffer values;
  if (decodes(exchange) && !payload.empty()) {
    values = links.pool->take(chunk.size_bytes);
    decode_chunk(exchange, payload, values.span());
    payload = values.span();
  }
  const auto& members = exchange.gradient<GroupedGradients>()->members;
  const auto& offsets = exchange.unit().offsets_bytes;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  for (std::size_t member = static_cast<std::size_t>(after - offsets.begin()) - 1; member < offsets.size(); ++member) {
    const std::size_t begin = std::max(offsets[member], chunk.offset_bytes);
    const std::size_t end = std::min(offsets[member] + members[member].size(), chunk.offset_bytes + payload.size());
    if (offsets[member] >= chunk.offset_bytes + payload.size()) break;
    if (begin >= end) continue;
    std::memcpy(members[member].data() + (begin - offsets[member]), payload.data() + (begin - chunk.offset_bytes),
                end - begin);
  }
  auto& buffers = exchange.progress.staged_chunks;
  if (header.chunk < buffers.size()) links.pool->give_back(std::move(buffers[header.chunk]));
  links.pool->give_back(std::move(values));
}

void ParameterServer::send_rule(const Exchange& exchange, const UpdateRule& rule, const Links& links) {
  const wire::TextMessage message = wire::Rule{rule}.make(envelope_of(exchange, links));
  std::set<Flow*> told;  // each flow gets the rule once, before the chunks that follow on it
  for (const Chunk& chunk : exchange.unit().chunks) {
    Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
    if (!told.insert(&flow).second) continue;
    flow.send(message.header, {message.payload()}, [text = message.text](const Status&) {});
  }
}

/// Returns the header of what the operation asks of the server of each chunk.
wire::Header ParameterServer::request_header(const Exchange& exchange, const Links& links) {
  if (exchange.push() != nullptr) return contribution_of(exchange, links, wire::Kind::push).make();
  const wire::Envelope about = envelope_of(exchange, links);
  const Unit& unit = exchange.unit();
  const bool narrower = unit.dtype != unit.value_dtype;  // than what the servers keep
  if (const auto* assign = std::get_if<Assign>(&exchange.operation))
    return wire::Assign{unit.dtype, assign->array, assign->update_count, narrower}.make(about);
  if (const auto* restore = std::get_if<Restore>(&exchange.operation))
    return wire::Restore{unit.value_dtype, restore->version_limit, narrower}.make(about);
  return wire::Pull{std::get<Pull>(exchange.operation).array, narrower}.make(about);
}

void ParameterServer::start(Exchange& exchange, const Links& links) const {
  expect_results(exchange);
  if (exchange.push() != nullptr && exchange.push()->rule) send_rule(exchange, *exchange.push()->rule, links);
  wire::Header header = request_header(exchange, links);
  for (const Chunk& chunk : exchange.unit().chunks) {
    header.chunk = chunk.index;
    auto payload = payload_of(exchange, chunk);
    const bool encodes = exchange.push() != nullptr && exchange.unit().converts() && !payload.empty();
    if (encodes) payload = {encode_chunk(exchange, chunk, payload, links)};
    send_to_server(exchange, links, chunk, header, std::move(payload));
  }
  // An assignment has no answer, because what follows it on a flow comes after it.
  if (std::holds_alternative<Assign>(exchange.operation)) exchange.progress.received = true;
  exchange.complete_if_done();  // a tensor without elements has no chunks to wait for
}

Status ParameterServer::check_awaited(const Exchange& exchange, const wire::Header& header) {
  const Progress& progress = exchange.progress;
  const auto* pull = std::get_if<Pull>(&exchange.operation);
  const bool expected =
      exchange.push() == nullptr
          ? header.kind == wire::Kind::value && wire::Value::read(header).array == (pull == nullptr ? 0 : pull->array)
          : header.kind == wire::Kind::result && header.step == exchange.step;
  if (!progress.running || !expected || header.chunk >= progress.chunks.size() ||
      progress.chunks[header.chunk] != ChunkArrival::awaited)
    return Status(ErrorCode::mismatch, "an unexpected result: step " + std::to_string(header.step) + ", chunk " +
                                           std::to_string(header.chunk));
  return {};
}

Status ParameterServer::check_payload(const wire::Header& header, DType dtype, std::size_t size_bytes) {
  const Answer answer(header);
  const bool fits = header.payload_bytes == size_bytes || (answer.absent && header.payload_bytes == 0);
  if (!fits || answer.dtype != dtype)
    return Status(ErrorCode::mismatch, "the result of chunk " + std::to_string(header.chunk) + " has " +
                                           std::to_string(header.payload_bytes) + " bytes instead of " +
                                           std::to_string(size_bytes));
  return {};
}

Status ParameterServer::check_result(const Exchange& exchange, const wire::Header& header) {
  if (Status status = check_awaited(exchange, header); !status.ok()) return status;
  const std::size_t chunk_bytes = exchange.unit().chunks[header.chunk].size_bytes;
  const DType dtype = answer_dtype(exchange);
  return check_payload(header, dtype, wants_result(exchange) ? exchange.unit().bytes_as(dtype, chunk_bytes) : 0);
}

/// Takes the fields of an answer.
void ParameterServer::take_answer(Exchange& exchange, const wire::Header& header) {
  LayerStats& outcome = exchange.outcome;
  if (header.kind == wire::Kind::result) {
    const auto result = wire::StepResult::read(header);
    outcome.factor_count = result.factor_count;
    if (!result.late) return;
    ++outcome.late_chunks;
    outcome.behind = std::max(outcome.behind, std::min(result.steps_since, wire::kMostStragglerSteps));
    return;
  }
  const auto value = wire::Value::read(header);
  // Chunks may have been updated in different steps (stragglers=drop).
  outcome.update_count = std::max(outcome.update_count, value.update_count);
  if (!std::holds_alternative<Restore>(exchange.operation)) return;
  const bool first = exchange.progress.chunks_missing == exchange.unit().chunks.size();
  outcome.oldest_version = first ? value.version : std::min(outcome.oldest_version, value.version);
  outcome.newest_version = first ? value.version : std::max(outcome.newest_version, value.version);
}

Result<std::span<std::byte>> ParameterServer::accept(Exchange& exchange, const wire::Header& header, bool lent,
                                                     const Links& links) const {
  if (Status status = check_result(exchange, header); !status.ok()) return status;
  Progress& progress = exchange.progress;
  progress.chunks[header.chunk] = ChunkArrival::accepted;
  if (scatters(exchange)) {
    if (lent || header.payload_bytes == 0) return std::span<std::byte>();
    progress.staged_chunks.resize(exchange.unit().chunks.size());
    Buffer& buffer = progress.staged_chunks[header.chunk];
    buffer = links.pool->take(header.payload_bytes);
    return buffer.span();
  }
  if (exchange.gradient<GroupedGradients>() != nullptr && !progress.group_result) {
    progress.group_result = links.pool->take(exchange.unit().size_bytes);
    progress.result = progress.group_result.span();
  }
  if (lent || header.payload_bytes == 0) return std::span<std::byte>();
  const Chunk& chunk = exchange.unit().chunks[header.chunk];
  return decodes(exchange) ? place_for_encoded(exchange, chunk, links) : place_of(exchange, chunk);
}

Status ParameterServer::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) const {
  if (scatters(exchange)) {
    scatter(exchange, header, payload, links);
  } else if (!payload.empty()) {
    const std::span<std::byte> place = place_of(exchange, exchange.unit().chunks[header.chunk]);
    if (decodes(exchange)) decode_chunk(exchange, payload, place);
    // A shard of this process lends its result instead of writing it here.
    else if (payload.data() != place.data())
      std::memcpy(place.data(), payload.data(), payload.size());
  }
  note_received(exchange, header, links);
  return {};
}

void ParameterServer::note_received(Exchange& exchange, const wire::Header& header, const Links& links) {
  const bool absent = Answer(header).absent;
  Progress& progress = exchange.progress;
  LayerStats& outcome = exchange.outcome;
  if (!links.is_local(exchange.unit().chunks[header.chunk]))
    outcome.bytes_received += wire::kHeaderBytes + header.payload_bytes;
  progress.chunks[header.chunk] = ChunkArrival::received;
  take_answer(exchange, header);
  outcome.present = outcome.present || !absent;
  if (absent) progress.empty_chunks.push_back(header.chunk);
  progress.received = --progress.chunks_missing == 0;
  if (progress.received) clear_empty_chunks(exchange);
  exchange.complete_if_done();
}

std::string ParameterServer::waiting_for(const Exchange& exchange) const {
  const auto& arrivals = exchange.progress.chunks;
  const auto first = std::ranges::find_if(arrivals, [](auto arrival) { return arrival != ChunkArrival::received; });
  if (first == arrivals.end()) return "sending its push";
  const auto& chunk = exchange.unit().chunks[static_cast<std::size_t>(first - arrivals.begin())];
  return "waiting for the result of chunk " + std::to_string(chunk.index) + " from server " +
         std::to_string(chunk.server) + " (" + std::to_string(exchange.progress.chunks_missing) + " of " +
         std::to_string(exchange.unit().chunks.size()) + " chunks missing)";
}

const SchemeProtocol& ps_scheme() {
  static const ParameterServer scheme({
      .title = "parameter server",
      .summary = "A sharded parameter server.",
      .converts = true,
      .uses_servers = true,
      .can_drop_late = true,
      .automatic = true,
      .cost = ps_cost,
  });
  return scheme;
}

}  // namespace poseidon
