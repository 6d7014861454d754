#include "scheme/host_reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernel/kernel.h"
#include "scheme/chunk_payload.h"
#include "scheme/conversion.h"
#include "wire/messages/contribution.h"

namespace poseidon::host_reduction {

namespace {

std::uint32_t own_host(const Links& links) { return links.hosts.host_of(links.rank); }

std::uint32_t leader_of(const Exchange& exchange, const Links& links, const Chunk& chunk) {
  return links.hosts.leader(own_host(links), exchange.unit(), chunk);
}

/// Returns the parts of a chunk, by the place of their ranks. There is room for this worker's own, which is not used.
LocalChunk& local_chunk(PeerInbox& inbox, const Exchange& exchange, const Links& links, std::uint32_t chunk) {
  inbox.local_chunks.resize(exchange.unit().chunks.size());
  LocalChunk& local = inbox.local_chunks[chunk];
  local.parts.resize(links.hosts.ranks_of(own_host(links)).size());
  return local;
}

void send_to_peer(Exchange& exchange, const Links& links, std::uint32_t rank, const wire::Header& header,
                  std::vector<std::span<const std::byte>> payload) {
  Flow* const flow = links.peers[rank][exchange.priority.priority_class];
  if (flow == nullptr) return;  // it has left, and needs nothing any more
  send_counted(exchange, links, *flow, {FlightEvent::Party::peer, links.hosts.over_network()}, header,
               std::move(payload));
}

/// How a sum is divided: partly here and then by the server.
struct Divisors {
  unsigned local = 1;
  unsigned server = 1;
};

/// The server divides alone, so that a float32 mean is rounded once. A sum that travels in 16 or 8 bits must not be
/// larger than the gradients are, so there a mean over all workers is a mean of the machines' means, or a sum of their
/// parts of it if they have different numbers of workers.
Divisors divisors_of(const Exchange& exchange, const Links& links) {
  const unsigned divisor = exchange.push()->divisor;
  if (!kernel::sums_in_float32(exchange.unit().wire_dtype) || divisor % links.worker_count != 0) return {1, divisor};
  if (!links.hosts.even()) return {divisor, 1};
  return {links.worker_count / links.hosts.count(), divisor / (links.worker_count / links.hosts.count())};
}

/// ErrorCode::mismatch: another worker's part does not fit this worker's.
Status check_fit(const wire::Contribution& own, const wire::Contribution& part) {
  if (own.excluded_from_mean || part.excluded_from_mean)
    return {ErrorCode::mismatch, "a gradient is marked as late, which only stragglers=drop allows"};
  if (part.divisor == own.divisor) return {};
  return {ErrorCode::mismatch, "rank " + std::to_string(part.rank) + " divides by " + std::to_string(part.divisor) +
                                   ", but rank " + std::to_string(own.rank) + " by " + std::to_string(own.divisor)};
}

/// What the machine pushes. `inputs` are the gradients that are present, in rank order.
struct Together {
  std::vector<const std::byte*> inputs;
  std::uint64_t factor_count = 0;
  std::span<std::byte> memory;  // of one of the inputs, which the sum may take; empty if there is none
};

Result<Together> gather(Exchange& exchange, const Links& links, const Chunk& chunk, const wire::Contribution& own) {
  Together together{.factor_count = own.factor_count};
  LocalChunk& local = local_chunk(exchange.progress.inbox, exchange, links, chunk.index);
  for (std::size_t place = 0; place < local.parts.size(); ++place) {
    LocalPart& part = local.parts[place];
    if (place == links.hosts.place_of(links.rank)) {
      if (!own.absent && chunk.size_bytes > 0)
        together.inputs.push_back(in_one_piece(exchange, chunk_payload(exchange, chunk), links).data());
      continue;
    }
    if (Status status = check_fit(own, part.push); !status.ok()) return status;
    together.factor_count += part.push.factor_count;
    if (links.hosts.over_network()) exchange.outcome.bytes_received += wire::kHeaderBytes + part.push.payload_bytes;
    if (part.push.absent || chunk.size_bytes == 0) continue;
    together.memory = part.buffer.span();
    together.inputs.push_back(part.buffer.data());
  }
  return together;
}

/// Returns the sum of the inputs, in memory that stays until the exchange ends.
std::span<const std::byte> sum_of(Exchange& exchange, const Links& links, const Chunk& chunk, const Together& together,
                                  unsigned divisor) {
  if (together.inputs.size() == 1 && divisor == 1) return {together.inputs.front(), chunk.size_bytes};
  std::span<std::byte> out = together.memory;
  if (out.empty()) out = exchange.progress.converted.emplace_back(links.pool->take(chunk.size_bytes)).span();
  const DType dtype = exchange.unit().dtype;
  kernel::sum(together.inputs, out.data(), chunk.size_bytes / dtype_bytes(dtype), dtype, divisor);
  return out;
}

/// What a rank of this machine still has to send for the chunk. Empty if it has to send nothing.
std::string awaited_of(const Exchange& exchange, const Links& links, const Chunk& chunk, std::uint32_t rank) {
  if (rank == links.rank || exchange.progress.chunks[chunk.index] == ChunkArrival::received) return "";
  const std::uint32_t leader = leader_of(exchange, links, chunk);
  if (leader == rank) return "the result";
  if (leader != links.rank) return "";
  const auto& chunks = exchange.progress.inbox.local_chunks;
  const bool none = chunk.index >= chunks.size() || chunks[chunk.index].parts.empty();
  return none || !chunks[chunk.index].parts[links.hosts.place_of(rank)].arrived ? "the gradient" : "";
}

}  // namespace

bool applies(const Exchange& exchange, const Links& links) {
  return exchange.about.by_host && exchange.push() != nullptr && exchange.protocol->traits().reduces_by_host &&
         links.hosts.together();
}

bool leads(const Exchange& exchange, const Links& links, const Chunk& chunk) {
  return leader_of(exchange, links, chunk) == links.rank;
}

wire::Envelope envelope_to_server(const Exchange& exchange, const Links& links) {
  wire::Envelope about = envelope_of(exchange, links);
  if (exchange.about.by_host && exchange.protocol->traits().reduces_by_host)
    about.rank = links.worker_count + own_host(links);
  return about;
}

void contribute(Exchange& exchange, const Links& links, const Chunk& chunk) {
  const std::uint32_t leader = leader_of(exchange, links, chunk);
  if (leader == links.rank) return push_if_whole(exchange, links, chunk);
  wire::Contribution body = contribution_of(exchange, links, wire::Kind::local_push);
  body.dtype = exchange.unit().dtype;
  body.chunk = chunk.index;
  send_to_peer(exchange, links, leader, body.make(), chunk_payload(exchange, chunk));
}

Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                       const Links& links) {
  const auto refuse = [&](const std::string& why) {
    return Status(ErrorCode::mismatch, "the gradient of chunk " + std::to_string(header.chunk) + " from rank " +
                                           std::to_string(header.rank) + " " + why);
  };
  const Unit& unit = exchange.unit();
  if (!exchange.about.by_host || header.chunk >= unit.chunks.size() ||
      !links.hosts.share_host(header.rank, links.rank) || !leads(exchange, links, unit.chunks[header.chunk]))
    return refuse("belongs to another worker");
  const auto body = wire::Contribution::read(header);
  const std::size_t size_bytes = body.absent ? 0 : unit.chunks[header.chunk].size_bytes;
  if (body.dtype != unit.dtype || header.payload_bytes != size_bytes)
    return refuse("has a size or dtype that does not match the layer's");
  LocalPart& part = local_chunk(inbox, exchange, links, header.chunk).parts[links.hosts.place_of(header.rank)];
  if (part.accepted) return refuse("came twice");
  part.buffer = links.pool->take(header.payload_bytes);
  part.accepted = true;
  part.push = body;
  return part.buffer.span();
}

void store_part(PeerInbox& inbox, const wire::Header& header, std::span<const std::byte> payload, const Links& links) {
  LocalChunk& local = inbox.local_chunks[header.chunk];
  LocalPart& part = local.parts[links.hosts.place_of(header.rank)];
  if (!payload.empty() && payload.data() != part.buffer.data())
    std::memcpy(part.buffer.data(), payload.data(), payload.size());
  part.arrived = true;
  ++local.arrived_count;
}

void push_if_whole(Exchange& exchange, const Links& links, const Chunk& chunk) {
  LocalChunk& local = local_chunk(exchange.progress.inbox, exchange, links, chunk.index);
  if (local.arrived_count + 1 < local.parts.size()) return;
  wire::Contribution body = contribution_of(exchange, links, wire::Kind::push);
  body.chunk = chunk.index;
  auto together = gather(exchange, links, chunk, body);
  if (!together.ok()) {
    exchange.progress.status = together.status();
    return exchange.complete_if_done();
  }
  const auto [local_divisor, server_divisor] = divisors_of(exchange, links);
  const Together& parts = together.value();
  // A machine is a worker of the server.
  body.rank = envelope_to_server(exchange, links).rank;
  body.wants_result = body.wants_result || others_want_result(exchange, links, chunk.index);
  body.worker_count = links.hosts.count();
  body.divisor = server_divisor;
  body.absent = parts.inputs.empty();
  body.factor_count = static_cast<std::uint32_t>(std::min<std::uint64_t>(parts.factor_count, wire::kUnboundedFactors));
  std::vector<std::span<const std::byte>> payload;
  if (!parts.inputs.empty()) {
    payload = {sum_of(exchange, links, chunk, parts, local_divisor)};
    if (exchange.unit().converts()) payload = {encode_chunk(exchange, chunk, payload, links)};
  }
  send_to_server(exchange, links, chunk, body.make(), std::move(payload));
}

void pass_on(Exchange& exchange, const Links& links, const wire::Header& result, std::span<const std::byte> values) {
  wire::Envelope about = envelope_of(exchange, links);
  about.chunk = result.chunk;
  wire::StepResult body = wire::StepResult::read(result);
  body.dtype = exchange.unit().dtype;
  const wire::Header header = body.make(about, wire::Kind::local_result);
  const LocalChunk& local = exchange.progress.inbox.local_chunks[result.chunk];
  for (const std::uint32_t rank : links.hosts.ranks_of(own_host(links))) {
    if (rank == links.rank) continue;
    std::vector<std::span<const std::byte>> payload;
    if (!values.empty() && local.parts[links.hosts.place_of(rank)].push.wants_result) payload.push_back(values);
    send_to_peer(exchange, links, rank, header, std::move(payload));
  }
}

bool others_want_result(const Exchange& exchange, const Links& links, std::uint32_t chunk) {
  const auto& chunks = exchange.progress.inbox.local_chunks;
  return applies(exchange, links) && chunk < chunks.size() &&
         std::ranges::any_of(chunks[chunk].parts,
                             [](const LocalPart& part) { return part.arrived && part.push.wants_result; });
}

bool is_from_leader(const Exchange& exchange, const Links& links, const wire::Header& header) {
  return leader_of(exchange, links, exchange.unit().chunks[header.chunk]) == header.rank;
}

bool lacks_gradient(const Exchange& exchange, const Links& links, std::size_t peer) {
  const auto rank = static_cast<std::uint32_t>(peer);
  return exchange.progress.running && applies(exchange, links) && links.hosts.share_host(rank, links.rank) &&
         std::ranges::any_of(exchange.unit().chunks, [&](const Chunk& chunk) {
           return leads(exchange, links, chunk) && !awaited_of(exchange, links, chunk, rank).empty();
         });
}

bool lacks(const Exchange& exchange, const Links& links, std::size_t peer) {
  const auto rank = static_cast<std::uint32_t>(peer);
  return applies(exchange, links) && links.hosts.share_host(rank, links.rank) &&
         std::ranges::any_of(exchange.unit().chunks,
                             [&](const Chunk& chunk) { return !awaited_of(exchange, links, chunk, rank).empty(); });
}

std::string missing(const Exchange& exchange, const Links& links) {
  if (!applies(exchange, links)) return "";
  for (const Chunk& chunk : exchange.unit().chunks)
    for (const std::uint32_t rank : links.hosts.ranks_of(own_host(links)))
      if (const std::string what = awaited_of(exchange, links, chunk, rank); !what.empty())
        return what + " of chunk " + std::to_string(chunk.index) + " from rank " + std::to_string(rank);
  return "";
}

}  // namespace poseidon::host_reduction
