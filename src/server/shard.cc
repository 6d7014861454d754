#include "server/shard.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "kernel/kernel.h"
#include "wire/messages.h"

namespace poseidon {

namespace {

std::uint64_t key_of(const wire::Header& header) { return std::uint64_t{header.unit} << 32 | header.chunk; }

/// K summed over the workers; saturates where one of them has no factors to send.
std::uint32_t sum_factor_counts(const ChunkState& chunk) {
  std::uint64_t total = 0;
  for (const auto& part : chunk.parts()) total += part->header.factor_count;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(total, wire::kUnboundedFactors));
}

}  // namespace

Shard::Shard(std::uint32_t worker_count, Reduction reduction, WideThreads wide)
    : worker_count_(worker_count), reduction_(reduction), wide_(wide) {}

Shard::~Shard() {
  for (auto& [key, entry] : entries_)
    if (entry.computing) entry.computed.wait();  // the threads still read its parts
}

Shard::Entry& Shard::entry_of(const wire::Header& header) {
  return entries_.try_emplace(key_of(header), worker_count_, reduction_, pool_).first->second;
}

StoredChunk& Shard::stored_of(Entry& entry) {
  if (!entry.stored) entry.stored = std::make_unique<StoredChunk>(pool_);
  return *entry.stored;
}

Result<Shard::Entry*> Shard::admit(const wire::Header& header, Requester& from) {
  Entry& entry = entry_of(header);
  Status status = entry.computing ? Status(ErrorCode::refused, "the chunk is being reduced; step " +
                                                                   std::to_string(header.step) + " comes too early")
                                  : entry.state.admit(header, &from);
  if (status.ok()) return &entry;
  if (!entry.state.started() && !entry.stored) entries_.erase(key_of(header));
  return status;
}

Result<std::span<std::byte>> Shard::begin(const wire::Header& header, Requester& from) {
  auto entry = admit(header, from);
  if (!entry.ok()) return entry.status();
  return entry.value()->state.place(header.rank);
}

void Shard::progress(const wire::Header& header, std::size_t received_bytes) {
  entry_of(header).state.progress(header.rank, received_bytes);
}

void Shard::complete(const wire::Header& header) {
  Entry& entry = entry_of(header);
  entry.state.complete(header.rank, entry.state.parts()[header.rank]->payload, nullptr);
  finish_if_all_here(entry);
}

Status Shard::add(const wire::Header& header, Requester& from, std::span<const std::byte> payload,
                  std::function<void()> release) {
  auto entry = admit(header, from);
  if (!entry.ok()) {
    if (release) release();
    return entry.status();
  }
  entry.value()->state.complete(header.rank, payload, std::move(release));
  finish_if_all_here(*entry.value());
  return {};
}

void Shard::finish_if_all_here(Entry& entry) {
  if (!entry.state.all_here()) return;
  if (!entry.state.any_present()) return finish(entry, Buffer());
  if (reduction_.aggregation == Aggregation::wide) return reduce_wide(entry);
  finish(entry, entry.state.take_sum());
}

/// Many threads on one array, which has to be here as a whole first (Parameter Hub Figure 7).
void Shard::reduce_wide(Entry& entry) {
  const auto inputs = entry.state.dense_inputs();
  if (inputs.empty()) return finish(entry, entry.state.take_sum());
  const wire::Header shape = entry.state.shape();
  const std::size_t element_bytes = dtype_bytes(shape.dtype);
  const std::size_t element_count = shape.payload_bytes / element_bytes;
  const auto part_count = static_cast<std::size_t>(wide_.executor->thread_count());
  const auto out = std::make_shared<Buffer>(pool_->take(shape.payload_bytes));
  const auto computed = std::make_shared<std::promise<void>>();
  entry.computing = true;
  entry.computed = computed->get_future();
  wide_.executor->run(
      part_count,
      [=](std::size_t part) {
        const std::size_t begin = element_count * part / part_count;
        const std::size_t end = element_count * (part + 1) / part_count;
        std::vector<const std::byte*> slices;
        slices.reserve(inputs.size());
        for (const std::byte* input : inputs) slices.push_back(input + begin * element_bytes);
        kernel::sum(slices, out->data() + begin * element_bytes, end - begin, shape.dtype, shape.divisor);
      },
      [this, key = key_of(shape), out, computed, loop = wide_.loop, alive = std::weak_ptr<bool>(alive_)] {
        loop->post([this, key, out, alive] {
          if (alive.expired()) return;
          Entry& done = entries_.at(key);
          done.computing = false;
          finish(done, std::move(*out));
        });
        computed->set_value();
      });
}

void Shard::finish(Entry& entry, Buffer sum) {
  const wire::Header shape = entry.state.shape();
  wire::Header header = shape;
  header.kind = wire::Kind::result;
  header.factor_count = sum_factor_counts(entry.state);
  const bool any_present = static_cast<bool>(sum);
  header.flags = static_cast<std::uint8_t>(any_present ? 0 : wire::kAbsent);
  std::shared_ptr<const Buffer> payload;
  if (any_present && (shape.flags & wire::kStored) != 0)
    payload = store(entry, std::move(sum), shape);
  else if (any_present)
    payload = pool_->share(std::move(sum));
  struct Answer {
    Requester* to;
    std::uint32_t rank;
    std::uint16_t priority;
    bool wants_result;
  };
  std::vector<Answer> answers;
  for (const auto& part : entry.state.parts())
    answers.push_back(
        {part->from, part->header.rank, part->header.priority, (part->header.flags & wire::kNoResult) == 0});
  entry.state.reset();
  for (const Answer& answer : answers) {
    if (answer.to == nullptr) continue;  // gone while other threads were adding
    header.rank = answer.rank;
    header.priority = answer.priority;
    if (any_present && !payload)
      answer.to->refuse(header, {ErrorCode::refused, "the update needs parameters and a rule of float32 or float64"});
    else
      answer.to->send(header, answer.wants_result ? payload : nullptr);
  }
  if ((shape.flags & wire::kTransient) != 0) entries_.erase(key_of(shape));
}

/// What the step makes of the chunk's value; the value itself is what goes back.
std::shared_ptr<const Buffer> Shard::store(Entry& entry, Buffer sum, const wire::Header& shape) {
  StoredChunk& stored = stored_of(entry);
  const auto rule = rules_.find(shape.unit);
  const bool updates = rule != rules_.end() && rule->second.kind != UpdateKind::none;
  if (updates) {
    const Status status = stored.update(rule->second, sum, shape.dtype);
    pool_->give_back(std::move(sum));
    if (!status.ok()) return nullptr;
  } else {
    stored.replace(std::move(sum), shape.dtype);
  }
  answer_pulls(entry);
  return stored.array(0);
}

Status Shard::set_rule(const wire::Header& header, std::span<const std::byte> payload) {
  auto rule = wire::read_rule(payload);
  if (!rule.ok()) return Status(ErrorCode::refused, rule.status().message());
  rules_[header.unit] = rule.value();
  return {};
}

Status Shard::assign(const wire::Header& header, std::span<const std::byte> payload) {
  if (payload.empty() || payload.size() % dtype_bytes(header.dtype) != 0)
    return {ErrorCode::refused, "an assignment of " + std::to_string(payload.size()) + " bytes is no array of " +
                                    std::string(dtype_name(header.dtype))};
  Entry& entry = entry_of(header);
  if (Status status = stored_of(entry).assign(header.rows, payload, header.dtype, header.step); !status.ok())
    return status;
  answer_pulls(entry);
  return {};
}

Status Shard::pull(const wire::Header& header, Requester& from) {
  Entry& entry = entry_of(header);
  entry.pulls.push_back({header, &from});
  if (stored_of(entry).has_value()) answer_pulls(entry);
  return {};
}

void Shard::answer_pulls(Entry& entry) {
  StoredChunk& stored = *entry.stored;
  if (!stored.has_value()) return;
  for (const PendingPull& pull : std::exchange(entry.pulls, {})) {
    wire::Header header = pull.header;
    header.kind = wire::Kind::value;
    header.dtype = stored.dtype();
    header.step = stored.update_count();
    if (auto array = stored.array(header.rows))
      pull.from->send(header, std::move(array));
    else
      pull.from->refuse(header, {ErrorCode::refused, "there is no array " + std::to_string(header.rows)});
  }
}

void Shard::drop(const Requester& from) {
  for (auto& [key, entry] : entries_) {
    if (entry.computing)
      entry.state.orphan(&from);
    else
      entry.state.drop(&from);
    std::erase_if(entry.pulls, [&from](const PendingPull& pull) { return pull.from == &from; });
  }
}

void Shard::for_each_overdue(std::int64_t started_before_ns,
                             const std::function<void(const wire::Header&, const std::string&)>& visit) const {
  for (const auto& [key, entry] : entries_) {
    const ChunkState& state = entry.state;
    if (!state.started() || state.started_ns() > started_before_ns) continue;
    std::string ranks;
    for (const auto rank : state.missing_ranks()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    visit(state.shape(), "waiting for the push of rank " + ranks + " since " +
                             std::to_string((now_ns() - state.started_ns()) / 1'000'000) +
                             " ms; it is stopped, far behind or cut off: see its output, or raise POSEIDON_TIMEOUT");
  }
}

}  // namespace poseidon
