#include "server/core/shard.h"

#include <iterator>

#include "base/clock.h"
#include "base/invariant.h"
#include "kernel/kernel.h"
#include "server/chunk/limits.h"
#include "server/chunk/no_room.h"
#include "wire/messages/contribution.h"
#include "wire/messages/rule.h"
#include "wire/messages/units.h"
#include "wire/update_rule.h"

namespace poseidon {

namespace {

// An estimate of what the tables need for a rank's part of a chunk.
constexpr std::size_t kRankBytes = sizeof(std::optional<Contribution>) + 2 * sizeof(std::size_t);

/// Returns the size of the sum to which a push of this size is added.
std::size_t sum_bytes(const wire::Contribution& push) {
  return push.payload_bytes / dtype_bytes(push.dtype) * kernel::running_sum_bytes(push.dtype);
}

}  // namespace

Shard::Shard(std::uint32_t worker_count, Reduction reduction, ShardThreads threads,
             std::shared_ptr<MemoryBudget> budget)
    : worker_count_(worker_count),
      reduction_(reduction),
      threads_(threads),
      pool_(std::make_shared<BufferPool>(std::move(budget))),
      entry_bytes_(limits::kNodeBytes + sizeof(Entry) + worker_count * kRankBytes),
      pace_(make_shard_pace(wire::Pace(), {worker_count, pool_, nullptr, nullptr})) {
  if (reduction.order == ReduceOrder::arrival) features_.add(Feature::arrival);
}

Shard::~Shard() {
  for (auto& [key, entry] : entries_)
    if (entry.computed.valid()) entry.computed.wait();  // the threads still read its parts
}

Status Shard::no_room(std::uint64_t size_bytes) const { return poseidon::no_room(*pool_, size_bytes); }

void Shard::set_pace(const wire::Pace& pace, Loop* loop,
                     std::function<void(std::uint32_t, const std::string&)> on_notice) {
  entry_bytes_ -= pace_->traits.bytes_of_a_chunk;
  pace_ = make_shard_pace(pace, {worker_count_, pool_, loop, std::move(on_notice)});
  entry_bytes_ += pace_->traits.bytes_of_a_chunk;
  features_.add(wire::features_of(pace));
  // A part that is still being received when a step ends must not be in the step's sum.
  if (pace_->traits.drops_late_ranks) reduction_.aggregation = Aggregation::at_once;
}

Shard::Entry::Entry(Shard& its_shard)
    : PacedChunk(its_shard.worker_count_, its_shard.reduction_, its_shard.pool_),
      shard(its_shard),
      pace(its_shard.pace_->chunk_pace(*this)) {}

std::shared_ptr<const Buffer> Shard::Entry::value(const wire::Contribution& push) {
  return shard.stored_of(*this).array_as(0, push.result_dtype());
}

bool Shard::Entry::has_rule(const wire::Contribution& push) const {
  const Rule* known = shard.rule_of(push);
  return known != nullptr && known->rule.kind != nullptr;
}

std::size_t Shard::Entry::update_bytes(const wire::Contribution& shape) const { return shard.update_bytes(shape); }

/// Counts the value and the states, and one more array if those that are being sent must stay as they are. It also
/// counts the gradient of the step before, and the value in fewer bits.
std::size_t Shard::update_bytes(const wire::Contribution& shape) const {
  const Rule* known = !shape.stored ? nullptr : rule_of(shape);
  if (known == nullptr || known->rule.kind == nullptr) return 0;
  const std::size_t array_count = update_state_count(known->rule) + 2 + (known->rule.keeps_gradient ? 1 : 0);
  return array_count * shape.value_bytes() + (shape.as_bfloat16 ? shape.value_bytes() / 2 : 0);
}

Status Shard::Entry::update(const wire::Contribution& shape, Buffer gradient) {
  UpdateBase base;
  return shard.store(*this, std::move(gradient), shape, base).status();
}

Result<Shard::Entry*> Shard::open(const wire::Envelope& about) {
  if (const auto found = entries_.find(key_of(about)); found != entries_.end()) return &found->second;
  if (entries_.size() >= limits::kChunks)
    return Status(ErrorCode::refused,
                  concat("a core of a server holds at most ", limits::kChunks,
                         " chunks of a job; use more servers, or more cores of each (server_cores)"));
  if (!pool_->try_charge(entry_bytes_)) return no_room(entry_bytes_);
  return &entries_.try_emplace(key_of(about), *this).first->second;
}

void Shard::forget(std::uint64_t key) {
  const auto entry = entries_.extract(key);
  if (entry.empty()) return;
  invariant(entry.mapped().needed_bytes <= needed_bytes_, "a chunk's need is part of the shard's");
  needed_bytes_ -= entry.mapped().needed_bytes;
  pool_->release(entry_bytes_);
}

/// Notes what a step of the chunk needs if nothing has come too early: its sum or all of its parts, and its update.
void Shard::note_need(Entry& entry, const wire::Contribution& push) {
  if (pool_->budget().lowest_limit_bytes() == 0) return;
  const std::size_t parts_bytes = entry.state.aggregator() == nullptr ? 0 : worker_count_ * push.payload_bytes;
  const std::size_t bytes = sum_bytes(push) + parts_bytes + update_bytes(push);
  largest_part_bytes_ = std::max<std::size_t>(largest_part_bytes_, push.payload_bytes);
  if (bytes <= entry.needed_bytes) return;
  needed_bytes_ += bytes - std::exchange(entry.needed_bytes, bytes);
}

/// No wait lasts for ever, for the following reason. A part that is received in its turn ends without help from one
/// that waits, and then its memory is free. When no such part is left, the parts in order are accepted or refused. Rank
/// 0's parts are always in order. So everything that rank 0 sends comes through, whatever is held up behind waiting
/// parts. Then all parts of rank 1 are in order, and so on.
bool Shard::may_receive(const wire::Envelope& push) const {
  one_thread_.check();
  const bool adds_on_arrival = push.kind == wire::Kind::push && push.rank < worker_count_ &&
                               reduction_.aggregation == Aggregation::streaming &&
                               reduction_.order == ReduceOrder::rank && !pace_->traits.applies_each_push;
  const std::size_t limit_bytes = pool_->budget().lowest_limit_bytes();
  if (!adds_on_arrival || limit_bytes == 0) return true;
  const auto found = entries_.find(key_of(push));
  const bool known = found != entries_.end();
  const bool fits_step = !known || !found->second.state.started() || found->second.state.shape().step == push.step;
  const bool in_order = known ? found->second.state.in_order(push.rank) : push.rank == 0;
  if (!fits_step || push.payload_bytes > limit_bytes) return true;  // it will be refused
  if (in_order) return turn_.use_count() == 1 || pool_->could_hold(push.payload_bytes);
  // Nothing is known of chunks that nobody has pushed yet. Half of the memory is kept for them.
  const std::size_t needed_bytes = std::max(needed_bytes_, limit_bytes / 2);
  const std::size_t turns_bytes = worker_count_ * std::max<std::size_t>(largest_part_bytes_, push.payload_bytes);
  return pool_->could_hold(needed_bytes + turns_bytes + push.payload_bytes);
}

/// Called after a request was refused, because that request may have been the first for the chunk.
void Shard::forget_if_unused(const wire::Envelope& about) {
  const auto found = entries_.find(key_of(about));
  if (found == entries_.end()) return;
  const Entry& entry = found->second;
  const bool stores = entry.stored && entry.stored->has_value();
  const bool busy = entry.state.started() || entry.computing || !entry.pace->idle();
  if (!busy && !stores && entry.pulls.empty()) forget(found->first);
}

Shard::Entry& Shard::entry_of(const wire::Envelope& about) {
  const auto found = entries_.find(key_of(about));
  invariant(found != entries_.end(), "a chunk is known while a part of it is being received");
  return found->second;
}

StoredChunk& Shard::stored_of(Entry& entry) {
  if (!entry.stored) entry.stored = std::make_unique<StoredChunk>(pool_);
  return *entry.stored;
}

Result<Shard::Entry*> Shard::admit(const wire::Contribution& push, Requester& from) {
  if (!pool_->has_room(0)) return no_room(push.payload_bytes);
  if (push.excluded_from_mean && !pace_->traits.drops_late_ranks)
    return Status(ErrorCode::refused, "a push is marked as late, which only stragglers=drop allows");
  auto opened = open(push);
  if (!opened.ok()) return opened;
  Entry& entry = *opened.value();
  const Status status =
      entry.computing
          ? Status(ErrorCode::refused, concat("the chunk is being reduced; step ", push.step, " comes too early"))
          : entry.pace->admit(entry, push, from);
  if (status.ok()) {
    if (collects_ && push.stored) {
      const Rule* known = rule_of(push);
      entry.state.set_aggregator(known == nullptr ? nullptr : known->aggregator);
    }
    note_need(entry, push);
    return opened;
  }
  forget_if_unused(push);
  return status;
}

Result<std::span<std::byte>> Shard::begin(const wire::Contribution& push, Requester& from) {
  one_thread_.check();
  Buffer buffer = pool_->try_take(push.payload_bytes);
  if (!buffer) return no_room(push.payload_bytes);
  auto entry = admit(push, from);
  if (!entry.ok()) {
    pool_->give_back(std::move(buffer));
    return entry.status();
  }
  return entry.value()->pace->place(*entry.value(), push, from, std::move(buffer), turn_);
}

void Shard::progress(const wire::Envelope& push, std::size_t received_bytes) {
  one_thread_.check();
  Entry& entry = entry_of(push);
  entry.pace->progress(entry, push, received_bytes);
}

void Shard::complete(const wire::Contribution& push) {
  one_thread_.check();
  Entry& entry = entry_of(push);
  entry.pace->complete(entry, push);
}

/// A lent part takes none of this server's memory, but its sum does.
Result<Shard::Entry*> Shard::admit_lent(const wire::Contribution& push, Requester& from) {
  const auto known = entries_.find(key_of(push));
  const std::size_t bytes = known == entries_.end() ? push.payload_bytes : known->second.state.missing_sum_bytes(push);
  if (!pool_->has_room(bytes)) return no_room(bytes);
  return admit(push, from);
}

Status Shard::add(const wire::Contribution& push, Requester& from, std::span<const std::byte> payload,
                  std::function<void()> release) {
  one_thread_.check();
  auto entry = admit_lent(push, from);
  if (!entry.ok()) {
    if (release) release();
    return entry.status();
  }
  entry.value()->pace->add(*entry.value(), push, from, payload, std::move(release));
  return {};
}

Status Shard::set_rule(const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  const auto message = wire::Rule::read(payload);
  Rule rule{.step = header.step};
  if (message.ok())
    rule.rule = message.value().rule;
  else
    rule.refusal = {ErrorCode::refused, message.status().message()};
  return keep_rule(rule_key(header.unit, header.rank), std::move(rule));
}

/// If pushes are applied one by one, each rank has the rule that it has sent.
std::uint64_t Shard::rule_key(std::uint32_t unit, std::uint32_t rank) const {
  return std::uint64_t{unit} << 32 | (pace_->traits.applies_each_push ? rank : 0);
}

const Shard::Rule* Shard::rule_of(const wire::Envelope& about) const {
  const auto known = rules_.find(rule_key(about.unit, about.rank));
  return known == rules_.end() ? nullptr : &known->second;
}

/// Keeps a rule that is refused, too: the sender's next push comes right behind it, and must not be applied by the rule
/// before.
Status Shard::keep_rule(std::uint64_t key, Rule rule) {
  if (const auto aggregator = aggregator_of(rule.rule); !rule.refusal.ok() || !aggregator.ok())
    rule.refusal = rule.refusal.ok() ? aggregator.status() : rule.refusal;
  else
    rule.aggregator = aggregator.value();
  Status refusal = rule.refusal;
  collects_ = collects_ || rule.aggregator != nullptr;
  if (const auto known = rules_.find(key); known != rules_.end()) {
    // With stragglers=drop every rank sends the rule, and late ranks send an old one.
    if (!pace_->traits.drops_late_ranks || rule.step >= known->second.step) known->second = std::move(rule);
    return refusal;
  }
  const std::size_t most = limits::kRules * (pace_->traits.applies_each_push ? worker_count_ : 1);
  if (rules_.size() >= most)
    return {ErrorCode::refused, concat("a core of a server keeps at most ", most,
                                       " rules of a job; use more servers, or more cores of each (server_cores)")};
  constexpr std::size_t rule_bytes = limits::kNodeBytes + sizeof(Rule);
  if (!pool_->try_charge(rule_bytes)) return no_room(rule_bytes);
  rules_.emplace(key, std::move(rule));
  return refusal;
}

Status Shard::describe_units(std::span<const std::byte> payload) {
  one_thread_.check();
  auto units = wire::StoredUnits::read(payload);
  if (!units.ok()) return Status(ErrorCode::refused, units.status().message());
  return checkpoint_ ? checkpoint_->describe(units.value()) : Status();
}

/// Sets the array that a request assigns, in the type in which the chunk keeps it.
Status Shard::keep(StoredChunk& stored, const wire::Assign& request, std::span<const std::byte> payload) {
  if (!request.float32_value) return stored.assign(request.array, payload, request.dtype, request.update_count);
  if (request.dtype != DType::bfloat16 && request.dtype != DType::float16)
    return {ErrorCode::refused, std::string(dtype_name(request.dtype)) + " is not kept in float32"};
  const std::size_t value_count = payload.size() / dtype_bytes(request.dtype);
  Buffer values = pool_->take(value_count * sizeof(float));
  kernel::decode(request.dtype, payload.data(), reinterpret_cast<float*>(values.data()), value_count);
  Status status = stored.assign(request.array, values.span(), DType::float32, request.update_count);
  pool_->give_back(std::move(values));
  return status;
}

Status Shard::assign(const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  const auto request = wire::Assign::read(header);
  if (payload.empty() || payload.size() % dtype_bytes(request.dtype) != 0)
    return {ErrorCode::refused, concat("an assignment of ", payload.size(),
                                       " bytes is not a whole number of elements of ", dtype_name(request.dtype))};
  const std::size_t new_bytes = request.float32_value ? 4 * payload.size() : payload.size();
  if (!pool_->has_room(new_bytes)) return no_room(new_bytes);
  auto entry = open(header);
  if (!entry.ok()) return entry.status();
  Status status = checkpoint_ ? checkpoint_->before_assign() : Status();
  if (status.ok()) status = keep(stored_of(*entry.value()), request, payload);
  if (status.ok() && checkpoint_) checkpoint_->assigned(header);
  if (status.ok())
    answer_pulls(*entry.value());
  else
    forget_if_unused(header);
  return status;
}

/// Answers with the chunk's contents from a checkpoint, or without payload if there are none.
Status Shard::restore(const wire::Header& header, Requester& from) {
  one_thread_.check();
  const auto request = wire::Restore::read(header);
  wire::Value answer;
  answer.dtype = request.as_bfloat16 ? DType::bfloat16 : request.dtype;
  answer.absent = true;
  if (!checkpoint_) {
    from.send(answer.make(header), nullptr);
    return {};
  }
  auto opened = open(header);
  if (!opened.ok()) return opened.status();
  StoredChunk& stored = stored_of(*opened.value());
  const auto restored = checkpoint_->restore(header, request.version_limit, stored);
  if (!restored.ok()) {
    forget_if_unused(header);
    return restored.status();
  }
  const auto& [version, rule] = restored.value();
  if (rule && *rule != UpdateRule() && rule_of(header) == nullptr) {
    if (Status status = keep_rule(rule_key(header.unit, header.rank), {.rule = *rule}); !status.ok()) return status;
  }
  answer.version = version;
  if (stored.has_value() && !request.as_bfloat16) answer.dtype = stored.dtype();
  answer.update_count = stored.update_count();
  answer.absent = version == 0;
  from.send(answer.make(header), version == 0 ? nullptr : stored.array_as(0, answer.dtype));
  answer_pulls(*opened.value());
  return {};
}

Status Shard::pull(const wire::Header& header, Requester& from) {
  one_thread_.check();
  auto opened = open(header);
  if (!opened.ok()) return opened.status();
  Entry& entry = *opened.value();
  const auto same = [&from](const PendingPull& pull) { return pull.from == &from; };
  if (std::ranges::any_of(entry.pulls, same))
    return {ErrorCode::refused, concat("rank ", header.rank, " waits for this chunk's value already")};
  entry.pulls.push_back({header, wire::Pull::read(header), &from});
  if (stored_of(entry).has_value()) answer_pulls(entry);
  return {};
}

void Shard::answer_pulls(Entry& entry) {
  invariant(entry.stored != nullptr, "only a chunk that is kept has pulls to answer");
  StoredChunk& stored = *entry.stored;
  if (!stored.has_value()) return;
  for (const PendingPull& pull : std::exchange(entry.pulls, {})) {
    const std::uint32_t index = pull.asked.array;
    wire::Value answer;
    answer.dtype = pull.asked.as_bfloat16 ? DType::bfloat16 : stored.dtype();
    answer.array = index;
    answer.update_count = stored.update_count();
    // A state that no update has created yet is created now.
    const bool may_be_new = index != 0 && index != kGradientArray;
    const std::size_t new_bytes = may_be_new ? stored.array(0)->size() : 0;
    if (!pool_->has_room(new_bytes))
      pull.from->refuse(pull.about, no_room(new_bytes));
    else if (auto array = stored.array_as(index, answer.dtype))
      pull.from->send(answer.make(pull.about), pull.asked.wants_payload ? std::move(array) : nullptr);
    else
      pull.from->refuse(pull.about, {ErrorCode::refused,
                                     index == kGradientArray
                                         ? "the server has kept no gradient; set a rule that keeps it (keeps_gradient)"
                                         : no_array(index)});
  }
}

void Shard::drop(const Requester& from) {
  one_thread_.check();
  for (auto& [key, entry] : entries_) {
    if (entry.computing)
      entry.state.orphan(&from);
    else
      entry.state.drop(&from);
    entry.pace->drop(entry, from);
    std::erase_if(entry.pulls, [&from](const PendingPull& pull) { return pull.from == &from; });
  }
}

std::vector<OpenChunk> Shard::open_chunks(std::int64_t started_before_ns) const {
  one_thread_.check();
  std::vector<OpenChunk> open;
  for (const auto& [key, entry] : entries_) add_open(entry, started_before_ns, open);
  return open;
}

void Shard::add_open(const Entry& entry, std::int64_t started_before_ns, std::vector<OpenChunk>& open) {
  const ChunkState& state = entry.state;
  if (state.started() && state.started_ns() < started_before_ns)
    open.push_back({state.shape(), state.started_ns(), state.missing_ranks()});
  entry.pace->add_waiting(started_before_ns, open);
}

std::vector<std::uint32_t> Shard::awaited_ranks(const wire::Envelope& contribution) const {
  one_thread_.check();
  std::vector<OpenChunk> open;
  const auto found = entries_.find(key_of(contribution));
  if (found != entries_.end()) add_open(found->second, INT64_MAX, open);
  std::vector<std::uint32_t> ranks;
  for (const OpenChunk& one : open) std::ranges::copy(one.missing_ranks, std::back_inserter(ranks));
  return ranks;
}

}  // namespace poseidon
