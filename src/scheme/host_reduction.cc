#include "scheme/host_reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/invariant.h"
#include "kernel/kernel.h"
#include "scheme/chunk_payload.h"
#include "scheme/conversion.h"
#include "scheme/value_base.h"
#include "wire/messages/contribution.h"
#include "wire/messages/stored.h"

namespace poseidon {

namespace {

/// The parts that a leader adds up, by the numbers of Hosts. There is room for this worker's own, which is not used.
LocalChunk& local_chunk(HostInbox& inbox, const Exchange& exchange, const Links& links, std::uint32_t chunk) {
  inbox.chunks.resize(exchange.unit().chunks.size());
  LocalChunk& local = inbox.chunks[chunk];
  local.parts.resize(links.hosts.part_count(links.rank));
  return local;
}

/// Whether this worker pushes the chunk to its server, for its whole rack.
bool pushes(const Exchange& exchange, const Links& links, const Chunk& chunk) {
  return !links.hosts.next(links.rank, exchange.unit(), chunk);
}

/// How many parts of other workers are in the chunk's sum.
std::size_t awaited_parts(const Exchange& exchange, const Links& links, const Chunk& chunk) {
  const std::size_t of_machine = links.hosts.mates_of(links.rank).size() - 1;
  const bool of_rack = pushes(exchange, links, chunk);
  return of_machine + (of_rack ? links.hosts.machine_count(links.rank) - 1 : 0);
}

void send_to_peer(Exchange& exchange, const Links& links, std::uint32_t rank, const wire::Header& header,
                  Pieces payload) {
  Flow* const flow = links.peers[rank][exchange.priority.priority_class];
  if (flow == nullptr) return;  // it has left, and needs nothing any more
  send_counted(exchange, links, *flow, {FlightEvent::Party::peer, links.hosts.crosses(links.rank, rank)}, header,
               std::move(payload));
}

/// How a sum is divided: partly by the machine, by the rack and by the server.
struct Divisors {
  unsigned machine = 1;
  unsigned rack = 1;
  unsigned server = 1;
};

/// The server divides alone, so that a float32 mean is rounded once. A sum that travels in 16 or 8 bits must not be
/// larger than the gradients are, so there a mean over all workers is a mean of means, or a sum of the machines' parts
/// of it if machines or racks differ in size.
Divisors divisors_of(const Exchange& exchange, const Links& links) {
  const unsigned divisor = exchange.push()->divisor;
  if (!kernel::sums_in_float32(exchange.unit().wire_dtype) || divisor % links.worker_count != 0)
    return {.server = divisor};
  if (!links.hosts.even()) return {.machine = divisor};
  Divisors divisors{static_cast<unsigned>(links.hosts.mates_of(links.rank).size()),
                    static_cast<unsigned>(links.hosts.machine_count(links.rank))};
  divisors.server = divisor / (divisors.machine * divisors.rack);
  return divisors;
}

/// ErrorCode::mismatch: another worker's part does not fit this worker's.
Status check_fit(const wire::Contribution& own, const wire::Contribution& part) {
  if (own.excluded_from_mean || part.excluded_from_mean)
    return {ErrorCode::mismatch, "a gradient is marked as late, which only stragglers=drop allows"};
  if (part.rule_digest != own.rule_digest)
    return {ErrorCode::mismatch,
            concat("rank ", part.rank, " has set another update rule than rank ", own.rank, "; ", wire::kSetSameRule)};
  if (part.divisor == own.divisor) return {};
  return {ErrorCode::mismatch, concat("rank ", part.rank, " divides by ", part.divisor, ", but rank ", own.rank, " by ",
                                      own.divisor, "; give the same divisor on all ranks")};
}

/// What is pushed for a machine, or for a rack.
struct Together {
  Pieces payload;  // empty if all are absent
  std::uint64_t factor_count = 0;
};

/// Returns the sum of the inputs, in memory that stays until the exchange ends. `spare` is one of the inputs' memory,
/// which the sum may take; it may be empty.
const std::byte* sum_of(Exchange& exchange, const Links& links, const Chunk& chunk,
                        const std::vector<const std::byte*>& inputs, unsigned divisor, std::span<std::byte> spare) {
  if (inputs.size() == 1 && divisor == 1) return inputs.front();
  if (spare.empty()) spare = exchange.progress.converted.emplace_back(links.pool->take(chunk.size_bytes)).span();
  const DType dtype = exchange.unit().dtype;
  kernel::sum(inputs, spare.data(), chunk.size_bytes / dtype_bytes(dtype), dtype, divisor);
  return spare.data();
}

/// Adds up the parts from `begin` to `end`, this worker's `own` included, whose number is `own_part`. Returns null if
/// all are absent.
const std::byte* sum_of_parts(Exchange& exchange, const Links& links, const Chunk& chunk, std::span<LocalPart> parts,
                              std::size_t own_part, const std::byte* own, unsigned divisor) {
  std::vector<const std::byte*> inputs;
  std::span<std::byte> spare;
  for (std::size_t index = 0; index < parts.size(); ++index) {
    if (index == own_part && own != nullptr) inputs.push_back(own);
    if (index == own_part || parts[index].push.absent) continue;
    spare = parts[index].buffer.span();
    inputs.push_back(spare.data());
  }
  return inputs.empty() ? nullptr : sum_of(exchange, links, chunk, inputs, divisor, spare);
}

/// Adds up what this worker leads: the parts of its machine, and then the sums of its rack's machines if it leads that.
Result<Together> gather(Exchange& exchange, const Links& links, const Chunk& chunk, const wire::Contribution& own) {
  Together together{{}, own.factor_count};
  LocalChunk& local = local_chunk(exchange.progress.inbox_of<HostInbox>(), exchange, links, chunk.index);
  for (const LocalPart& part : local.parts) {
    if (!part.arrived) continue;  // this worker's own, or a machine's if another worker leads the rack
    if (Status status = check_fit(own, part.push); !status.ok()) return status;
    together.factor_count += part.push.factor_count;
    if (links.hosts.crosses(part.push.rank, links.rank))
      exchange.outcome.bytes_received += wire::kHeaderBytes + part.push.payload_bytes;
  }
  const Divisors divisors = divisors_of(exchange, links);
  const Hosts& hosts = links.hosts;
  const auto parts = std::span(local.parts);
  const std::size_t mates = hosts.mates_of(links.rank).size();
  const std::byte* sum = nullptr;
  if (!own.absent) sum = in_one_piece(exchange, chunk_payload(exchange, chunk), links).data();
  sum = sum_of_parts(exchange, links, chunk, parts.first(mates), hosts.part_of(links.rank, links.rank), sum,
                     divisors.machine);
  if (pushes(exchange, links, chunk))
    sum =
        sum_of_parts(exchange, links, chunk, parts.subspan(mates), hosts.place_in_rack(links.rank), sum, divisors.rack);
  if (sum != nullptr) together.payload = {{sum, chunk.size_bytes}};
  return together;
}

/// What a rank of this rack still has to send for the chunk. Empty if it has to send nothing.
std::string awaited_of(const Exchange& exchange, const Links& links, const Chunk& chunk, std::uint32_t rank) {
  if (rank == links.rank || exchange.progress.awaited().chunks[chunk.index] == ChunkArrival::received) return "";
  if (links.hosts.next(links.rank, exchange.unit(), chunk) == rank) return "the result";
  if (links.hosts.next(rank, exchange.unit(), chunk) != links.rank) return "";
  const auto& chunks = exchange.progress.inbox_of<HostInbox>().chunks;
  const bool none = chunk.index >= chunks.size() || chunks[chunk.index].parts.empty();
  return none || !chunks[chunk.index].parts[links.hosts.part_of(links.rank, rank)].arrived ? "the gradient" : "";
}

/// The name of the rack (a machine without racks) for which a worker speaks to servers: it follows those of the ranks.
std::uint32_t name_of_rack(const Links& links) { return links.worker_count + links.hosts.rack_of(links.rank); }

/// Whether other workers want the result of a chunk that this worker leads. Known once its sum has been sent.
bool others_want_result(const Exchange& exchange, std::uint32_t chunk) {
  if (exchange.push() == nullptr) return false;
  const auto& chunks = exchange.progress.inbox_of<HostInbox>().chunks;
  return chunk < chunks.size() && std::ranges::any_of(chunks[chunk].parts, [](const LocalPart& part) {
           return part.arrived && part.push.wants_result;
         });
}

/// The header of a question whose answer tells that the chunk's assignment has been done.
wire::Header confirmation_header(const Exchange& exchange, wire::Envelope about, const Chunk& chunk) {
  about.chunk = chunk.index;
  const Unit& unit = exchange.unit();
  return wire::Pull{std::get<Assign>(exchange.operation).array, unit.dtype != unit.value_dtype, false}.make(about);
}

/// Text such as "the gradient of chunk 3 from rank 2" about the first that is missing; empty if nothing is.
std::string missing(const Exchange& exchange, const Links& links) {
  for (const Chunk& chunk : exchange.unit().chunks)
    for (const std::uint32_t rank : links.hosts.rack_mates_of(links.rank))
      if (const std::string what = awaited_of(exchange, links, chunk, rank); !what.empty())
        return concat(what, " of chunk ", chunk.index, " from rank ", rank,
                      links.hosts.share_host(rank, links.rank) ? " on this machine" : " of this rack");
  return "";
}

}  // namespace

bool HostReduction::exchanges_with_server(const Exchange& exchange, const Links& links, const Chunk& chunk) const {
  return exchange.push() == nullptr || pushes(exchange, links, chunk);
}

wire::Envelope HostReduction::envelope_to_server(const Exchange& exchange, const Links& links) const {
  wire::Envelope about = envelope_of(exchange, links);
  about.rank = name_of_rack(links);
  return about;
}

void HostReduction::start(Exchange& exchange, const Links& links) const {
  if (!std::holds_alternative<HostInbox>(exchange.progress.inbox)) exchange.progress.inbox.emplace<HostInbox>();
  ParameterServer::start(exchange, links);
}

/// The next gradient may come over another worker's flow, so an assignment has to be done before.
bool HostReduction::confirms(const Exchange& exchange) const {
  return std::holds_alternative<Assign>(exchange.operation);
}

/// Contributes this worker's part of the chunk, or asks the server itself.
void HostReduction::send_chunk(Exchange& exchange, const Links& links, const Chunk& chunk, wire::Header header) const {
  if (exchange.push() == nullptr) {
    ParameterServer::send_chunk(exchange, links, chunk, header);
    if (confirms(exchange)) {
      const wire::Header question = confirmation_header(exchange, envelope_to_server(exchange, links), chunk);
      send_to_server(exchange, links, chunk, question, {});
    }
    return;
  }
  if (links.hosts.leads(links.rank, exchange.unit(), chunk)) return push_if_whole(exchange, links, chunk);
  wire::Contribution body = contribution_of(exchange, links, wire::Kind::local_push);
  body.dtype = exchange.unit().dtype;
  body.chunk = chunk.index;
  send_to_peer(exchange, links, *links.hosts.next(links.rank, exchange.unit(), chunk), body.make(),
               chunk_payload(exchange, chunk));
}

Result<std::span<std::byte>> HostReduction::make_room(HostInbox& inbox, const Exchange& exchange,
                                                      const wire::Header& header, const Links& links) {
  const auto refuse = [&](const std::string& why) {
    return Status(ErrorCode::mismatch,
                  concat("the gradient of chunk ", header.chunk, " from rank ", header.rank, " ", why));
  };
  const Unit& unit = exchange.unit();
  if (!exchange.about.by_host || header.chunk >= unit.chunks.size() ||
      links.hosts.next(header.rank, unit, unit.chunks[header.chunk]) != links.rank)
    return refuse("belongs to another worker");
  const auto body = wire::Contribution::read(header);
  const std::size_t size_bytes = body.absent ? 0 : unit.chunks[header.chunk].size_bytes;
  if (body.dtype != unit.dtype || header.payload_bytes != size_bytes)
    return refuse("has a size or dtype that does not match the layer's; build the same model on all ranks");
  LocalPart& part =
      local_chunk(inbox, exchange, links, header.chunk).parts[links.hosts.part_of(links.rank, header.rank)];
  if (part.accepted) return refuse("came twice");
  part.buffer = links.pool->take(header.payload_bytes);
  part.accepted = true;
  part.push = body;
  return part.buffer.span();
}

void HostReduction::store(HostInbox& inbox, const wire::Header& header, std::span<const std::byte> payload,
                          const Links& links) {
  LocalChunk& local = inbox.chunks[header.chunk];
  LocalPart& part = local.parts[links.hosts.part_of(links.rank, header.rank)];
  invariant(part.accepted && !part.arrived && payload.size() <= part.buffer.size(),
            "a part completes once, in the memory that it was given");
  if (!payload.empty() && payload.data() != part.buffer.data())
    std::memcpy(part.buffer.data(), payload.data(), payload.size());
  part.arrived = true;
  ++local.arrived_count;
}

Result<std::span<std::byte>> HostReduction::accept(Exchange& exchange, const wire::Header& header, bool lent,
                                                   const Links& links) const {
  if (header.kind == wire::Kind::local_push && exchange.push() != nullptr)
    return make_room(exchange.progress.inbox_of<HostInbox>(), exchange, header, links);
  return ParameterServer::accept(exchange, header, lent, links);
}

Status HostReduction::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                              const Links& links) const {
  if (header.kind != wire::Kind::local_push) return ParameterServer::receive(exchange, header, payload, links);
  store(exchange.progress.inbox_of<HostInbox>(), header, payload, links);
  push_if_whole(exchange, links, exchange.unit().chunks[header.chunk]);
  return {};
}

/// Sends the chunk's sum on when all parts of it are here, this worker's own included: to its server, or to whoever
/// leads the rack.
void HostReduction::push_if_whole(Exchange& exchange, const Links& links, const Chunk& chunk) const {
  LocalChunk& local = local_chunk(exchange.progress.inbox_of<HostInbox>(), exchange, links, chunk.index);
  if (local.arrived_count < awaited_parts(exchange, links, chunk)) return;
  const auto above = links.hosts.next(links.rank, exchange.unit(), chunk);
  wire::Contribution body = contribution_of(exchange, links, above ? wire::Kind::local_push : wire::Kind::push);
  body.chunk = chunk.index;
  auto gathered = gather(exchange, links, chunk, body);
  if (!gathered.ok()) {
    exchange.progress.status = gathered.status();
    return exchange.complete_if_done();
  }
  Together& together = gathered.value();
  body.wants_result = body.wants_result || others_want_result(exchange, chunk.index);
  body.absent = together.payload.empty();
  body.factor_count =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(together.factor_count, wire::kUnboundedFactors));
  if (above) {
    body.dtype = exchange.unit().dtype;
    return send_to_peer(exchange, links, *above, body.make(), std::move(together.payload));
  }
  // A rack is a worker of the server, or a machine without racks.
  body.rank = name_of_rack(links);
  body.worker_count = links.hosts.rack_count();
  body.divisor = divisors_of(exchange, links).server;
  if (!together.payload.empty() && exchange.unit().converts())
    together.payload = {encode_chunk(exchange, chunk, together.payload, links)};
  name_base(exchange, links, body);
  send_to_server(exchange, links, chunk, body.make(), std::move(together.payload));
}

/// A chunk's result comes from whoever leads it here, or from its server.
bool HostReduction::is_result(const Exchange& exchange, const wire::Header& header, const Links& links) const {
  const auto leader = links.hosts.next(links.rank, exchange.unit(), exchange.unit().chunks[header.chunk]);
  return leader ? header.kind == wire::Kind::local_result && header.rank == *leader : header.kind == wire::Kind::result;
}

bool HostReduction::brings_values(const Exchange& exchange, std::uint32_t chunk) const {
  return wants_result(exchange) || others_want_result(exchange, chunk);
}

/// A result that is only for others has no place in this worker's memory.
bool HostReduction::stages(const Exchange& exchange, const wire::Header& answer) const {
  return ParameterServer::stages(exchange, answer) ||
         (!wants_result(exchange) && others_want_result(exchange, answer.chunk));
}

/// What is passed on stays until the exchange ends.
std::span<const std::byte> HostReduction::keep_staged(Exchange& exchange, const Links& links, Buffer memory,
                                                      std::span<const std::byte> values) const {
  if (!memory) {  // lent
    memory = links.pool->take(values.size());
    std::memcpy(memory.data(), values.data(), values.size());
  }
  return exchange.progress.converted.emplace_back(std::move(memory)).span();
}

/// Gives a chunk's result to those whose parts are in this worker's sum of it, if they want it, and tells the rest that
/// the step has ended. `values` are empty if nobody has contributed.
void HostReduction::pass_on(Exchange& exchange, const Links& links, const wire::Header& answer,
                            std::span<const std::byte> values) const {
  const auto& chunks = exchange.progress.inbox_of<HostInbox>().chunks;
  if (exchange.push() == nullptr || answer.chunk >= chunks.size()) return;  // this worker leads none
  wire::Envelope about = envelope_of(exchange, links);
  about.chunk = answer.chunk;
  wire::StepResult body = wire::StepResult::read(answer);
  body.dtype = exchange.unit().dtype;
  body.difference = false;
  const wire::Header header = body.make(about, wire::Kind::local_result);
  for (const LocalPart& part : chunks[answer.chunk].parts) {
    if (!part.arrived) continue;
    Pieces payload;
    if (!values.empty() && part.push.wants_result) payload.push_back(values);
    send_to_peer(exchange, links, part.push.rank, header, std::move(payload));
  }
}

bool HostReduction::lacks(const Exchange& exchange, const Links& links, std::uint32_t peer) const {
  return exchange.push() != nullptr && links.hosts.share_rack(peer, links.rank) &&
         std::ranges::any_of(exchange.unit().chunks,
                             [&](const Chunk& chunk) { return !awaited_of(exchange, links, chunk, peer).empty(); });
}

bool HostReduction::lacks_part(const Exchange& exchange, const Links& links, std::uint32_t peer) const {
  return exchange.push() != nullptr && links.hosts.share_rack(peer, links.rank) &&
         std::ranges::any_of(exchange.unit().chunks, [&](const Chunk& chunk) {
           return links.hosts.next(peer, exchange.unit(), chunk) == links.rank &&
                  !awaited_of(exchange, links, chunk, peer).empty();
         });
}

std::string HostReduction::waiting_for(const Exchange& exchange, const Links& links) const {
  if (exchange.push() != nullptr)
    if (const std::string local = missing(exchange, links); !local.empty()) return "waiting for " + local;
  return ParameterServer::waiting_for(exchange, links);
}

const HostReduction& host_reduction() {
  static const HostReduction scheme(traits_of(Scheme::ps));
  return scheme;
}

}  // namespace poseidon
