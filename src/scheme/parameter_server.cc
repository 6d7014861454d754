#include "scheme/parameter_server.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/invariant.h"
#include "kernel/kernel.h"
#include "scheme/chunk_payload.h"
#include "scheme/conversion.h"
#include "scheme/value_base.h"
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
    if (header.kind != wire::Kind::value) {
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

/// The type of an answer: that of the unit, unless it comes from a server, which may send another one.
DType answer_dtype(const Exchange& exchange, const wire::Header& answer) {
  const bool from_server = answer.kind == wire::Kind::result || answer.kind == wire::Kind::value;
  return from_server ? exchange.result_dtype() : exchange.unit().dtype;
}

/// Whether an answer has another type than the unit.
bool decodes(const Exchange& exchange, const wire::Header& answer) {
  return answer_dtype(exchange, answer) != exchange.unit().dtype;
}

/// Of a layer whose result is copied past the caches: with it, 4 processes of a machine exchange 256 MB in 0.33 s, and
/// in 0.36 s without.
constexpr std::size_t kLargeBytes = 1u << 20;

/// Copies a chunk's values to their place. Nobody reads a large layer before much else has come.
void copy_result(const Exchange& exchange, std::span<const std::byte> values, std::span<std::byte> place) {
  invariant(values.size() == place.size(), "a result has the size of its chunk");
  if (exchange.unit().size_bytes >= kLargeBytes)
    kernel::copy_past_caches(values, place.data());
  else
    std::memcpy(place.data(), values.data(), values.size());
}

/// Whether a group's result is copied to its members chunk by chunk.
bool scatters(const Exchange& exchange) {
  const auto* group = exchange.gradient<GroupedGradients>();
  return group != nullptr && !group->members.empty();
}

}  // namespace

bool ParameterServer::wants_result(const Exchange& exchange) {
  if (std::holds_alternative<Assign>(exchange.operation)) return false;
  return exchange.push() == nullptr || exchange.push()->wants_result;
}

/// Marks every chunk as awaited.
void ParameterServer::expect_results(Exchange& exchange) {
  Progress& progress = exchange.progress;
  ServerAnswers& answers = progress.answers.emplace();
  answers.missing_count = exchange.unit().chunks.size();
  answers.chunks.resize(answers.missing_count, ChunkArrival::awaited);
  progress.received = answers.missing_count == 0;
  // A tensor without elements has no server to ask.
  exchange.outcome.present = progress.received && exchange.gradient<NoGradient>() == nullptr;
}

/// With stragglers=drop, a step may have ended without the only worker that contributed, for some chunks and not for
/// others. All workers then have to use the same values for these chunks.
void ParameterServer::clear_empty_chunks(const Exchange& exchange) {
  const Progress& progress = exchange.progress;
  if (!exchange.outcome.present || exchange.about.stored || progress.result.empty()) return;
  for (const std::uint32_t index : progress.awaited().empty_chunks) {
    const Chunk& chunk = exchange.unit().chunks[index];
    std::memset(progress.result.data() + chunk.offset_bytes, 0, chunk.size_bytes);
  }
}

/// Copies a chunk of a group's result to the members.
void ParameterServer::scatter(const Exchange& exchange, const Chunk& chunk, std::span<const std::byte> values) {
  const auto& members = exchange.gradient<GroupedGradients>()->members;
  const auto& offsets = exchange.unit().offsets_bytes;
  invariant(members.size() == offsets.size() && values.size() == chunk.size_bytes,
            "a group's result goes to all its members");
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  for (std::size_t member = static_cast<std::size_t>(after - offsets.begin()) - 1; member < offsets.size(); ++member) {
    const std::size_t begin = std::max(offsets[member], chunk.offset_bytes);
    const std::size_t end = std::min(offsets[member] + members[member].size(), chunk.offset_bytes + values.size());
    if (offsets[member] >= chunk.offset_bytes + values.size()) break;
    if (begin >= end) continue;
    std::memcpy(members[member].data() + (begin - offsets[member]), values.data() + (begin - chunk.offset_bytes),
                end - begin);
  }
}

wire::Envelope ParameterServer::envelope_to_server(const Exchange& exchange, const Links& links) const {
  return envelope_of(exchange, links);
}

void ParameterServer::send_rule(const Exchange& exchange, const UpdateRule& rule, const Links& links) const {
  const wire::TextMessage message = wire::Rule{rule}.make(envelope_to_server(exchange, links));
  std::set<Flow*> told;  // each flow gets the rule once, before the chunks that follow on it
  for (const Chunk& chunk : exchange.unit().chunks) {
    if (!exchanges_with_server(exchange, links, chunk)) continue;
    Flow& flow = links.flow_of(chunk, exchange.priority.priority_class);
    if (!told.insert(&flow).second) continue;
    flow.send(message.header, {message.payload()}, [text = message.text](const Status&) {});
  }
}

/// Returns the header of what the operation asks of the server of each chunk.
wire::Header ParameterServer::request_header(const Exchange& exchange, const Links& links) const {
  if (exchange.push() != nullptr) return contribution_of(exchange, links, wire::Kind::push).make();
  const wire::Envelope about = envelope_to_server(exchange, links);
  const Unit& unit = exchange.unit();
  const bool narrower = unit.dtype != unit.value_dtype;  // than what the servers keep
  if (const auto* assign = std::get_if<Assign>(&exchange.operation))
    return wire::Assign{unit.dtype, assign->array, assign->update_count, narrower}.make(about);
  if (const auto* restore = std::get_if<Restore>(&exchange.operation))
    return wire::Restore{unit.value_dtype, restore->version_limit, narrower}.make(about);
  const bool rounds = exchange.result_dtype() != unit.dtype;
  return wire::Pull{std::get<Pull>(exchange.operation).array, narrower || rounds}.make(about);
}

void ParameterServer::send_chunk(Exchange& exchange, const Links& links, const Chunk& chunk,
                                 wire::Header header) const {
  header.chunk = chunk.index;
  if (exchange.push() != nullptr && exchange.about.stored) {
    auto push = wire::Contribution::read(header);
    name_base(exchange, links, push);
    header = push.make();
  }
  auto payload = chunk_payload(exchange, chunk);
  const bool encodes = exchange.push() != nullptr && exchange.unit().converts() && !payload.empty();
  if (encodes) payload = {encode_chunk(exchange, chunk, payload, links)};
  send_to_server(exchange, links, chunk, header, std::move(payload));
}

void ParameterServer::start(Exchange& exchange, const Links& links) const {
  expect_results(exchange);
  if (exchange.push() != nullptr && exchange.push()->rule) send_rule(exchange, *exchange.push()->rule, links);
  const wire::Header header = request_header(exchange, links);
  for (const Chunk& chunk : exchange.unit().chunks) {
    send_chunk(exchange, links, chunk, header);
    if (!exchange.progress.running) return;  // it has failed, and its memory may be gone
  }
  // An assignment has no answer, because what follows it on a flow comes after it.
  if (std::holds_alternative<Assign>(exchange.operation) && !confirms(exchange)) exchange.progress.received = true;
  exchange.complete_if_done();  // a tensor without elements has no chunks to wait for
}

/// Which array the operation is about.
std::uint32_t array_of(const Operation& operation) {
  if (const auto* assign = std::get_if<Assign>(&operation)) return assign->array;
  const auto* pull = std::get_if<Pull>(&operation);
  return pull == nullptr ? 0 : pull->array;
}

bool ParameterServer::is_result(const Exchange& /*exchange*/, const wire::Header& header,
                                const Links& /*links*/) const {
  return header.kind == wire::Kind::result;
}

Status ParameterServer::check_awaited(const Exchange& exchange, const wire::Header& header, const Links& links) const {
  const Progress& progress = exchange.progress;
  const auto is_awaited = [&] {
    const auto& chunks = progress.awaited().chunks;
    return header.chunk < chunks.size() && chunks[header.chunk] == ChunkArrival::awaited;
  };
  const auto is_expected = [&] {
    if (exchange.push() != nullptr && !progress.awaited().asked_again.contains(header.chunk))
      return header.step == exchange.step && is_result(exchange, header, links);
    return header.kind == wire::Kind::value && wire::Value::read(header).array == array_of(exchange.operation);
  };
  if (progress.running && is_awaited() && is_expected()) return {};
  return {ErrorCode::mismatch, concat("an unexpected result: step ", header.step, ", chunk ", header.chunk)};
}

Status ParameterServer::check_payload(const wire::Header& header, DType dtype, std::size_t size_bytes,
                                      const Exchange* exchange) {
  const Answer answer(header);
  if (is_difference(header) && (exchange == nullptr || !has_base(*exchange, header)))
    return {ErrorCode::mismatch,
            concat("the result of chunk ", header.chunk, " is a difference from a value that was not named")};
  const bool fits = header.payload_bytes == size_bytes || (answer.absent && header.payload_bytes == 0);
  if (!fits || answer.dtype != dtype)
    return Status(ErrorCode::mismatch, concat("the result of chunk ", header.chunk, " has ", header.payload_bytes,
                                              " bytes instead of ", size_bytes));
  return {};
}

bool ParameterServer::brings_values(const Exchange& exchange, std::uint32_t /*chunk*/) const {
  return wants_result(exchange);
}

Status ParameterServer::check_result(const Exchange& exchange, const wire::Header& header, const Links& links) const {
  if (Status status = check_awaited(exchange, header, links); !status.ok()) return status;
  const std::size_t chunk_bytes = exchange.unit().chunks[header.chunk].size_bytes;
  const DType dtype = answer_dtype(exchange, header);
  const bool brings = brings_values(exchange, header.chunk);
  return check_payload(header, dtype, brings ? exchange.unit().bytes_as(dtype, chunk_bytes) : 0, &exchange);
}

/// Takes the fields of an answer.
void ParameterServer::take_answer(Exchange& exchange, const wire::Header& header) {
  LayerStats& outcome = exchange.outcome;
  if (header.kind != wire::Kind::value) {
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
  const bool first = exchange.progress.awaited().missing_count == exchange.unit().chunks.size();
  outcome.oldest_version = first ? value.version : std::min(outcome.oldest_version, value.version);
  outcome.newest_version = first ? value.version : std::max(outcome.newest_version, value.version);
}

bool ParameterServer::stages(const Exchange& exchange, const wire::Header& /*answer*/) const {
  return scatters(exchange);
}

Result<std::span<std::byte>> ParameterServer::accept(Exchange& exchange, const wire::Header& header, bool lent,
                                                     const Links& links) const {
  if (Status status = check_result(exchange, header, links); !status.ok()) return status;
  Progress& progress = exchange.progress;
  ServerAnswers& answers = progress.awaited();
  answers.chunks[header.chunk] = ChunkArrival::accepted;
  if (stages(exchange, header) || is_difference(header)) {
    if (lent || header.payload_bytes == 0) return std::span<std::byte>();
    answers.staged.resize(exchange.unit().chunks.size());
    Buffer& buffer = answers.staged[header.chunk];
    buffer = links.pool->take(header.payload_bytes);
    return buffer.span();
  }
  if (exchange.gradient<GroupedGradients>() != nullptr && !answers.group_result) {
    answers.group_result = links.pool->take(exchange.unit().size_bytes);
    progress.result = answers.group_result.span();
  }
  if (lent || header.payload_bytes == 0) return std::span<std::byte>();
  const Chunk& chunk = exchange.unit().chunks[header.chunk];
  return decodes(exchange, header) ? place_for_encoded(exchange, chunk, links) : place_of(exchange, chunk);
}

std::span<const std::byte> ParameterServer::keep_staged(Exchange& /*exchange*/, const Links& links, Buffer memory,
                                                        std::span<const std::byte> /*values*/) const {
  links.pool->give_back(std::move(memory));
  return {};
}

/// Writes a group's chunk to its members, if it is one. Returns the values in memory that stays until the exchange ends
/// if they have to be passed on.
std::span<const std::byte> ParameterServer::take_staged(Exchange& exchange, const wire::Header& header,
                                                        std::span<const std::byte> payload, const Links& links) const {
  const Chunk& chunk = exchange.unit().chunks[header.chunk];
  auto& staged = exchange.progress.awaited().staged;
  Buffer values = header.chunk < staged.size() ? std::move(staged[header.chunk]) : Buffer();
  if (decodes(exchange, header)) {
    Buffer decoded = links.pool->take(chunk.size_bytes);
    decode_chunk(exchange, payload, decoded.span());
    links.pool->give_back(std::exchange(values, std::move(decoded)));
    payload = values.span();
  }
  if (scatters(exchange)) scatter(exchange, chunk, payload);
  return keep_staged(exchange, links, std::move(values), payload);
}

/// Writes a chunk to its place, and returns that.
std::span<const std::byte> ParameterServer::take_placed(const Exchange& exchange, const wire::Header& header,
                                                        std::span<const std::byte> payload) {
  const std::span<std::byte> place = place_of(exchange, exchange.unit().chunks[header.chunk]);
  if (decodes(exchange, header)) decode_chunk(exchange, payload, place);
  // A shard of this process lends its result instead of writing it here.
  else if (payload.data() != place.data())
    copy_result(exchange, payload, place);
  return place;
}

/// Asks the server for the whole value of a chunk whose difference has no base here any more. It cannot have changed:
/// the next step needs this worker. With stragglers=drop it may be newer, as that of a late worker.
void ParameterServer::ask_again(Exchange& exchange, const Links& links, const wire::Header& difference) const {
  const Unit& unit = exchange.unit();
  ServerAnswers& answers = exchange.progress.awaited();
  answers.asked_again.emplace(difference.chunk, difference);
  answers.chunks[difference.chunk] = ChunkArrival::awaited;
  take_answer(exchange, difference);
  exchange.outcome.bytes_received += wire::kHeaderBytes + difference.payload_bytes;
  wire::Envelope about = envelope_to_server(exchange, links);
  about.chunk = difference.chunk;
  const Chunk& chunk = unit.chunks[difference.chunk];
  send_counted(exchange, links, links.flow_of(chunk, exchange.priority.priority_class),
               {FlightEvent::Party::server, true}, wire::Pull{0, unit.dtype != unit.value_dtype}.make(about), {});
}

Status ParameterServer::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                                const Links& links) const {
  std::span<const std::byte> values;
  if (is_difference(header)) {
    Buffer& staged = exchange.progress.awaited().staged[header.chunk];
    invariant(payload.data() == staged.data(), "a difference comes over a network, into memory of its own");
    const bool taken = take_difference(exchange, header, staged.span().first(payload.size()));
    links.pool->give_back(std::move(staged));
    if (!taken) {
      ask_again(exchange, links, header);
      return {};
    }
    values = place_of(exchange, exchange.unit().chunks[header.chunk]);
  } else if (!payload.empty()) {
    values = stages(exchange, header) ? take_staged(exchange, header, payload, links)
                                      : take_placed(exchange, header, payload);
  }
  const auto first = exchange.progress.awaited().asked_again.find(header.chunk);
  pass_on(exchange, links, first == exchange.progress.awaited().asked_again.end() ? header : first->second, values);
  note_received(exchange, header, links);
  return {};
}

void ParameterServer::note_received(Exchange& exchange, const wire::Header& header, const Links& links) {
  const bool absent = Answer(header).absent;
  Progress& progress = exchange.progress;
  LayerStats& outcome = exchange.outcome;
  const bool crossed = header.kind == wire::Kind::local_result ? links.hosts.crosses(header.rank, links.rank)
                                                               : !links.is_local(exchange.unit().chunks[header.chunk]);
  if (crossed) outcome.bytes_received += wire::kHeaderBytes + header.payload_bytes;
  ServerAnswers& answers = progress.awaited();
  invariant(answers.chunks[header.chunk] == ChunkArrival::accepted && answers.missing_count > 0,
            "an answer completes once, after it was accepted");
  answers.chunks[header.chunk] = ChunkArrival::received;
  take_answer(exchange, header);
  outcome.present = outcome.present || !absent;
  if (absent) answers.empty_chunks.push_back(header.chunk);
  progress.received = --answers.missing_count == 0;
  if (progress.received) clear_empty_chunks(exchange);
  exchange.complete_if_done();
}

std::string ParameterServer::waiting_for(const Exchange& exchange, const Links& /*links*/) const {
  const auto& arrivals = exchange.progress.awaited().chunks;
  const auto first = std::ranges::find_if(arrivals, [](auto arrival) { return arrival != ChunkArrival::received; });
  if (first == arrivals.end()) return "sending its push";
  const auto& chunk = exchange.unit().chunks[static_cast<std::size_t>(first - arrivals.begin())];
  return concat("waiting for the result of chunk ", chunk.index, " from server ", chunk.server, " (",
                exchange.progress.awaited().missing_count, " of ", exchange.unit().chunks.size(), " chunks missing)");
}

const SchemeProtocol& ps_scheme() {
  static const ParameterServer scheme({
      .title = "parameter server",
      .summary = "A sharded parameter server.",
      .converts = true,
      .uses_servers = true,
      .reduces_by_host = true,
      .can_drop_late = true,
      .automatic = true,
      .cost = ps_cost,
  });
  return scheme;
}

}  // namespace poseidon
