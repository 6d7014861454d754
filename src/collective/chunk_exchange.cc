#include "collective/chunk_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/invariant.h"
#include "kernel/combine.h"

namespace poseidon {

namespace {

/// Of the calls that the ranks of a communicator must have alike. FNV-1a.
class Signature {
 public:
  Signature& add(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ static_cast<std::uint8_t>(value >> (8 * i))) * 16777619u;
    return *this;
  }
  std::uint32_t value() const { return hash_; }

 private:
  std::uint32_t hash_ = 2166136261u;
};

bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::all_reduce || kind == CollectiveKind::reduce || kind == CollectiveKind::reduce_scatter;
}

bool has_root(CollectiveKind kind) {
  return kind == CollectiveKind::reduce || kind == CollectiveKind::gather || kind == CollectiveKind::broadcast ||
         kind == CollectiveKind::scatter;
}

/// Sizes of what only some ranks know are compared message by message.
std::uint32_t signature_of(const CollectiveCall& call) {
  Signature signature;
  signature.add(static_cast<std::uint64_t>(call.kind)).add(call.label);
  if (reduces(call.kind))
    signature.add(static_cast<std::uint64_t>(call.op)).add(static_cast<std::uint64_t>(call.element)).add(call.divisor);
  if (has_root(call.kind)) signature.add(call.root);
  return signature.value();
}

std::size_t bytes_of(const CollectiveCall& call) {
  std::size_t bytes = 0;
  for (const auto& input : call.inputs) bytes += input.size();
  if (bytes > 0) return bytes;
  for (const auto& output : call.outputs) bytes += output.size();
  return bytes;
}

/// How values travel: integers are not coded.
DType sent_as(Element element) {
  const auto dtype = dtype_of(element);
  return dtype && dtype_is_floating(*dtype) ? *dtype : DType::int64;
}

}  // namespace

ChunkExchange::ChunkExchange(NumberedCall numbered, const Communicator& communicator, const Links& links,
                             std::function<void()> on_change)
    : call_(std::move(numbered.call)),
      number_(numbered.number),
      signature_(signature_of(call_)),
      communicator_(communicator),
      links_(links),
      on_change_(std::move(on_change)),
      priority_{poseidon::level_of(call_.urgency), 0},
      bytes_to_(communicator.size()),
      bytes_from_(communicator.size()),
      ready_(communicator.size()),
      held_(communicator.size()),
      gone_(communicator.size()) {
  const CollectiveShape shape = shape_of_call(call_, communicator.rank, communicator.size(), numbered.chunk_bytes);
  std::vector<ChunkRole> roles = roles_of(shape, communicator.hosts);
  order_.resize(roles.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::ranges::sort(order_, {}, [&roles](std::size_t index) { return roles[index].chunk; });
  // order_ has now by number what roles has in the order of beginning. Both are wanted the other way round.
  std::vector<std::size_t> place(roles.size());
  for (std::size_t i = 0; i < order_.size(); ++i) place[order_[i]] = i;
  chunks_.resize(roles.size());
  for (std::size_t i = 0; i < roles.size(); ++i) chunks_[place[i]].role = std::move(roles[i]);
  order_ = std::move(place);
  for (ChunkState& state : chunks_) {
    for (const auto& level : state.role.levels) {
      state.parts.emplace_back(level.size());
      state.missing_count += level.size();
    }
  }
  unfinished_ = chunks_.size();
  for (std::size_t i = 0; i < call_.inputs.size(); ++i)
    if (is_combined_by_all(shape) || is_overwritten(i)) copy_input(i);
}

/// Whether a result is written to memory of an input that may not have been sent by then. A result may take the place
/// of the part of this rank alone, of which it is made.
bool ChunkExchange::is_overwritten(std::size_t input) const {
  const auto part = call_.inputs[input];
  for (std::size_t output = 0; output < call_.outputs.size(); ++output) {
    const std::span<const std::byte> result = call_.outputs[output];
    if (part.empty() || result.empty()) continue;
    const bool apart = part.data() + part.size() <= result.data() || result.data() + result.size() <= part.data();
    const bool in_its_place = part.data() == result.data() && part.size() == result.size() &&
                              (call_.inputs.size() == 1 || input == communicator_.rank) &&
                              (call_.outputs.size() == 1 || output == communicator_.rank);
    if (!apart && !in_its_place) return true;
  }
  return false;
}

void ChunkExchange::copy_input(std::size_t input) {
  Buffer& copy = own_inputs_.emplace_back(links_.pool->take(call_.inputs[input].size()));
  std::ranges::copy(call_.inputs[input], copy.data());
  call_.inputs[input] = copy.span();
}

ChunkExchange::~ChunkExchange() {
  const auto give_back = [this](Buffer& buffer) { links_.pool->give_back(std::move(buffer)); };
  for (ChunkState& state : chunks_) {
    for (auto& level : state.parts)
      for (Part& part : level) give_back(part.buffer);
    give_back(state.combined);
  }
  for (Buffer& copy : own_inputs_) give_back(copy);
}

std::span<const std::byte> ChunkExchange::input_of(const ChunkRole& role) const {
  if (!role.input || call_.inputs.empty()) return {};  // a barrier has parts without values
  return call_.inputs[role.input->array].subspan(role.input->offset_bytes, role.size_bytes);
}

std::span<std::byte> ChunkExchange::output_of(const ChunkRole& role) const {
  if (!role.output || call_.outputs.empty()) return {};
  return call_.outputs[role.output->array].subspan(role.output->offset_bytes, role.size_bytes);
}

ChunkExchange::ChunkState* ChunkExchange::find(std::uint32_t chunk) {
  const auto found = std::ranges::lower_bound(chunks_, chunk, {}, [](const ChunkState& one) { return one.role.chunk; });
  return found != chunks_.end() && found->role.chunk == chunk ? &*found : nullptr;
}

ChunkExchange::Part* ChunkExchange::part_of(ChunkState& state, std::uint32_t rank) {
  for (std::size_t level = 0; level < state.parts.size(); ++level) {
    const auto& ranks = state.role.levels[level];
    const auto found = std::ranges::lower_bound(ranks, rank);
    if (found != ranks.end() && *found == rank)
      return &state.parts[level][static_cast<std::size_t>(found - ranks.begin())];
  }
  return nullptr;
}

/// Whether the only part is the result, so that it is received where that belongs.
bool ChunkExchange::passes_through(const ChunkState& state) const {
  return !state.role.input && state.parts.size() == 1 && state.parts.front().size() == 1 && state.role.output;
}

/// Counts what goes between this rank and each other one, and tells those that must know it before they send, or before
/// they are sent to.
void ChunkExchange::count_bytes() {
  for (const ChunkState& state : chunks_) {
    const ChunkRole& role = state.role;
    if (role.parent) bytes_to_[*role.parent] += role.size_bytes;
    for (const std::uint32_t rank : role.receivers) bytes_to_[rank] += role.size_bytes;
    if (role.source) bytes_from_[*role.source] += role.size_bytes;
    for (const auto& level : role.levels)
      for (const std::uint32_t rank : level) bytes_from_[rank] += role.size_bytes;
  }
  const wire::Envelope about{
      .priority = priority_.level, .rank = links_.rank, .unit = communicator_.id, .step = number_};
  for (std::uint32_t rank = 0; rank < communicator_.size(); ++rank) {
    if (bytes_from_[rank] <= kUnaskedBytes && bytes_to_[rank] <= kUnaskedBytes) continue;
    const wire::Ready told{.takes_bytes = bytes_from_[rank], .gives_bytes = bytes_to_[rank], .signature = signature_};
    transmit(rank, told.make(about), {});
  }
}

void ChunkExchange::start() {
  one_thread_.check();
  count_bytes();
  for (const std::size_t index : order_) advance(chunks_[index]);
}

Status ChunkExchange::ready(std::uint32_t rank, const wire::Ready& told) {
  one_thread_.check();
  if (told.signature != signature_) return unexpected(rank, "its kind, operation, dtype or root differ");
  if (told.takes_bytes != bytes_to_[rank] || told.gives_bytes != bytes_from_[rank])
    return unexpected(rank, concat("it takes ", told.takes_bytes, " bytes and gives ", told.gives_bytes, ", but here ",
                                   bytes_to_[rank], " and ", bytes_from_[rank], " are exchanged with it"));
  ready_[rank] = true;
  for (const Held& held : std::exchange(held_[rank], {})) {
    --sends_pending_;
    transmit(rank, held.header, held.payload);
  }
  return {};
}

Status ChunkExchange::departure() const {
  if (gone_count_ == 0 || failed_) return {};
  const auto rank = std::ranges::find(gone_, true) - gone_.begin();
  return {ErrorCode::peer_lost,
          concat("rank ", rank, " of the group has left before ", name(), "; make the same calls on all its ranks")};
}

void ChunkExchange::fail() {
  one_thread_.check();
  failed_ = true;
  for (auto& held : held_) sends_pending_ -= std::exchange(held, {}).size();
}

Status ChunkExchange::unexpected(std::uint32_t rank, const std::string& why) const {
  return {ErrorCode::mismatch,
          concat("rank ", rank, " of the group makes another call as ", name(), ": ", why,
                 "; make the same calls in the same order, with one shape and dtype, on all its ranks")};
}

Result<std::span<std::byte>> ChunkExchange::accept(std::uint32_t rank, const wire::Header& header, bool lent) {
  one_thread_.check();
  const auto piece = wire::Piece::read(header);
  if (piece.signature != signature_) return unexpected(rank, "its kind, operation, dtype or root differ");
  ChunkState* const state = find(header.chunk);
  if (state == nullptr || piece.total_bytes != state->role.total_bytes ||
      header.payload_bytes != state->role.size_bytes)
    return unexpected(
        rank, concat("chunk ", header.chunk, " has ", header.payload_bytes, " bytes of ", piece.total_bytes, " there"));
  if (piece.is_result) {
    if (state->role.source != rank || std::exchange(state->result_accepted, true))
      return unexpected(rank, concat("a result of chunk ", header.chunk, " that is not awaited"));
  } else {
    Part* const part = part_of(*state, rank);
    if (part == nullptr || std::exchange(part->accepted, true))
      return unexpected(rank, concat("a part of chunk ", header.chunk, " that is not awaited"));
  }
  return lent ? std::span<std::byte>() : memory_for(*state, rank, piece.is_result);
}

/// Where a part or a result is received.
std::span<std::byte> ChunkExchange::memory_for(ChunkState& state, std::uint32_t rank, bool is_result) {
  if (state.role.output && (is_result || passes_through(state))) return output_of(state.role);
  Buffer& buffer = is_result ? state.combined : part_of(state, rank)->buffer;
  if (!buffer) buffer = links_.pool->take(state.role.size_bytes);
  return buffer.span();
}

void ChunkExchange::receive(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  if (failed_) return;
  ChunkState& state = *find(header.chunk);
  const bool is_result = wire::Piece::read(header).is_result;
  const std::span<std::byte> place = memory_for(state, rank, is_result);
  if (!payload.empty() && payload.data() != place.data()) std::memcpy(place.data(), payload.data(), payload.size());
  if (is_result) return take_result(state, place);
  Part& part = *part_of(state, rank);
  invariant(part.accepted && !part.arrived, "a part arrives once, after its header");
  part.arrived = true;
  --state.missing_count;
  advance(state);
}

/// Combines a chunk whose parts are all here, and gives it to whom it belongs.
void ChunkExchange::advance(ChunkState& state) {
  if (state.missing_count > 0 || state.given) return;
  state.given = true;
  const ChunkRole& role = state.role;
  // Who has neither a part nor parts of others waits for the result.
  if (!role.input && role.levels.empty()) return;
  const auto value = combine(state);
  if (role.parent) give(*role.parent, state, false, value);
  if (!role.source) return take_result(state, value);
  if (is_finished(state)) --unfinished_;
}

/// Whether nothing of the chunk is awaited any more.
bool ChunkExchange::is_finished(const ChunkState& state) const {
  return state.given && (!state.role.source || state.has_result);
}

std::span<const std::byte> ChunkExchange::combine(ChunkState& state) {
  if (passes_through(state)) return output_of(state.role);
  std::span<const std::byte> value = input_of(state.role);
  if (state.parts.empty()) return combine_level(state, 0, value);
  for (std::size_t level = 0; level < state.parts.size(); ++level) value = combine_level(state, level, value);
  for (auto& level : state.parts)
    for (Part& part : level)
      if (part.buffer.data() != value.data()) links_.pool->give_back(std::move(part.buffer));
  return value;
}

/// Combines the parts of a level with what this rank has, in the order of the ranks. Whoever owns the chunk divides it.
std::span<const std::byte> ChunkExchange::combine_level(ChunkState& state, std::size_t level,
                                                        std::span<const std::byte> own) {
  std::vector<const std::byte*> inputs;
  bool own_is_in = own.data() == nullptr;
  const std::size_t count = state.parts.empty() ? 0 : state.parts[level].size();
  for (std::size_t i = 0; i < count; ++i) {
    if (!own_is_in && communicator_.rank < state.role.levels[level][i]) {
      inputs.push_back(own.data());
      own_is_in = true;
    }
    inputs.push_back(state.parts[level][i].buffer.data());
  }
  if (!own_is_in) inputs.push_back(own.data());
  const bool last = state.parts.empty() || level + 1 == state.parts.size();
  const std::uint32_t divisor = last && !state.role.parent ? call_.divisor : 1;
  if (state.role.size_bytes == 0 || (inputs.size() == 1 && divisor == 1))
    return {inputs.empty() ? nullptr : inputs.front(), state.role.size_bytes};
  std::span<std::byte> out = state.role.parent ? std::span<std::byte>() : output_of(state.role);
  if (out.empty()) {
    if (!state.combined) state.combined = links_.pool->take(state.role.size_bytes);
    out = state.combined.span();
  }
  kernel::combine(call_.op, call_.element, inputs, out.data(), out.size() / element_bytes(call_.element), divisor);
  return out;
}

void ChunkExchange::take_result(ChunkState& state, std::span<const std::byte> value) {
  invariant(!state.has_result, "a chunk has one result");
  state.has_result = true;
  const std::span<std::byte> output = output_of(state.role);
  if (!output.empty()) {
    if (value.data() != output.data()) std::memmove(output.data(), value.data(), value.size());
    value = output;
  }
  for (const std::uint32_t rank : state.role.receivers) give(rank, state, true, value);
  if (is_finished(state)) --unfinished_;
}

void ChunkExchange::give(std::uint32_t rank, const ChunkState& state, bool is_result,
                         std::span<const std::byte> value) {
  wire::Envelope about{.priority = priority_.level, .rank = links_.rank, .unit = communicator_.id};
  about.chunk = state.role.chunk;
  about.step = number_;
  const wire::Header header = wire::Piece{.dtype = sent_as(call_.element),
                                          .is_result = is_result,
                                          .total_bytes = state.role.total_bytes,
                                          .signature = signature_}
                                  .make(about);
  if (bytes_to_[rank] > kUnaskedBytes && !ready_[rank]) {
    ++sends_pending_;
    held_[rank].push_back({header, value});
  } else {
    transmit(rank, header, value);
  }
}

void ChunkExchange::transmit(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload) {
  Flow* const flow = links_.peers[communicator_.ranks[rank]][priority_.priority_class];
  if (flow == nullptr) return note_gone(rank);
  Pieces pieces;
  if (!payload.empty()) pieces.push_back(payload);
  ++sends_pending_;
  flow->send(header, std::move(pieces), [this, rank](const Status& status) {
    invariant(sends_pending_ > 0, "a send is done once, before its call ends");
    // A failed send also closes its flow. Whoever hears of that asks whether this call lacks something.
    if (!status.ok()) note_gone(rank);
    if (--sends_pending_ == 0) on_change_();
  });
}

void ChunkExchange::note_gone(std::uint32_t rank) {
  if (!gone_[rank]) ++gone_count_;
  gone_[rank] = true;
}

bool ChunkExchange::lacks(std::uint32_t rank) const {
  one_thread_.check();
  if (failed_) return false;
  if (gone_[rank] || !held_[rank].empty()) return true;
  return std::ranges::any_of(chunks_, [&](const ChunkState& state) {
    if (state.role.source == rank && !state.has_result) return true;
    // Or it still has to get something.
    if (state.role.parent == rank && !state.given) return true;
    if (!state.has_result && std::ranges::find(state.role.receivers, rank) != state.role.receivers.end()) return true;
    const Part* const part = part_of(state, rank);
    return part != nullptr && !part->arrived;
  });
}

std::string ChunkExchange::name() const {
  const std::string what = reduces(call_.kind)
                               ? concat(" of ", element_name(call_.element), " (", reduce_op_name(call_.op), ")")
                               : std::string();
  return concat(collective_name(call_.kind), what, " of ", bytes_of(call_), " bytes, call ", number_);
}

std::string ChunkExchange::waiting_for() const {
  std::string ranks;
  for (std::uint32_t rank = 0; rank < communicator_.size(); ++rank)
    if (lacks(rank)) ranks += (ranks.empty() ? "" : ", ") + std::to_string(communicator_.ranks[rank]);
  return ranks.empty() ? "sending its parts" : "waiting for rank " + ranks;
}

}  // namespace poseidon
