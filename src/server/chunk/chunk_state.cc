#include "server/chunk/chunk_state.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/invariant.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

namespace {

/// Parts are added in multiples of this: whole elements and, but for blocks, whole cache lines. Other bytes wait for
/// the next ones.
constexpr std::size_t grain_bytes(DType dtype) { return std::max<std::size_t>(64, dtype_bytes(dtype)); }
constexpr std::size_t kNone = ~std::size_t{0};

/// Whether the sum is kept in float32. Sums of 16-bit types are rounded once, at the end, if they are added part by
/// part.
bool sums_wide(DType dtype) { return kernel::sums_in_float32(dtype); }

/// ErrorCode::refused: the value or the result cannot have the type that the push says.
Status check_types(const wire::Contribution& push) {
  const bool named = push.float32_value || push.as_bfloat16;
  if (named && (!push.stored || push.kind != wire::Kind::push))
    return refused_push(push, "only the gradient of what servers keep names the types of value and result");
  if ((push.float32_value && !sums_wide(push.dtype)) || (push.as_bfloat16 && push.value_dtype() != DType::float32))
    return refused_push(push, "its value or result cannot have the type that it names");
  if (push.stored && dtype_values(push.value_dtype()) != 1)
    return refused_push(push, "servers keep no values of 8 bits");
  return {};
}

}  // namespace

Result<std::size_t> dense_bytes(const wire::Contribution& push) {
  if (Status status = check_types(push); !status.ok()) return status;
  if (push.absent)
    return push.payload_bytes == 0 ? Result<std::size_t>(std::size_t{0})
                                   : refused_push(push, "it is marked as absent but has a payload");
  if (push.kind == wire::Kind::push) {
    if (push.payload_bytes % dtype_bytes(push.dtype) != 0)
      return refused_push(push, "its size is not a multiple of the element size");
    return static_cast<std::size_t>(push.payload_bytes);
  }
  const auto matrix = push.matrix_bytes();
  if ((push.dense ? matrix : push.factor_bytes()) != push.payload_bytes)
    return refused_push(push, "the size of its factors does not match its header");
  if (!dtype_is_floating(push.dtype) || dtype_values(push.dtype) != 1)
    return refused_push(push, "factors must have a floating-point dtype");
  if (!matrix || *matrix == 0) return refused_push(push, "its matrix is empty or too large");
  return static_cast<std::size_t>(*matrix);
}

Result<std::size_t> contribution_bytes(const wire::Contribution& push, std::size_t worker_count) {
  if (push.rank >= worker_count || push.worker_count != worker_count)
    return refused_push(push,
                        concat("it is for a job of ", push.worker_count, " workers, but this job has ", worker_count));
  if (push.divisor == 0 || (push.divisor != 1 && !dtype_is_floating(push.dtype)))
    return refused_push(push, concat(dtype_name(push.dtype), " cannot be divided by ", push.divisor));
  return dense_bytes(push);
}

ChunkState::ChunkState(std::uint32_t worker_count, Reduction reduction, std::shared_ptr<BufferPool> pool)
    : reduction_(reduction), pool_(std::move(pool)), parts_(worker_count) {
  reset();
}

Status ChunkState::fits(const wire::Contribution& push, std::size_t size_bytes) const {
  if (push.step != shape_.step)
    return refused_push(push, concat("the chunk is in step ", shape_.step, " since rank ", shape_.rank,
                                     " pushed it; let all ranks exchange the layer equally often"));
  if (parts_[push.rank]) return refused_push(push, "it has pushed this chunk already");
  if (push.kind != shape_.kind)
    return refused_push(push, concat("it sends ", wire::kind_name(push.kind), ", but rank ", shape_.rank, " sends ",
                                     wire::kind_name(shape_.kind), "; give the layer the same scheme on all ranks"));
  if (push.dtype != shape_.dtype || push.divisor != shape_.divisor || push.stored != shape_.stored ||
      push.float32_value != shape_.float32_value || push.as_bfloat16 != shape_.as_bfloat16)
    return refused_push(push, concat("its dtype, divisor or kind differs from rank ", shape_.rank,
                                     "'s; give the layer the same on all ranks"));
  if (push.rule_digest != shape_.rule_digest)
    return {ErrorCode::mismatch, concat("rank ", push.rank, " has set another update rule than rank ", shape_.rank,
                                        "; ", wire::kSetSameRule)};
  const bool present = !push.absent;
  if (present && dense_bytes_ && size_bytes != *dense_bytes_) return refused_size(push, size_bytes, *dense_bytes_);
  if (push.rows != shape_.rows || push.cols != shape_.cols)
    return refused_push(push,
                        "its factors have another shape than the other ranks'; build the same model on all ranks");
  return {};
}

Status ChunkState::admit(const wire::Contribution& push, Requester* from) {
  one_thread_.check();
  auto size = contribution_bytes(push, parts_.size());
  if (!size.ok()) return size.status();
  if (lost_)
    return refused_push(push, "the chunk's step cannot end: a rank that has pushed it has left, see its output");
  if (started()) {
    if (Status status = fits(push, size.value()); !status.ok()) return status;
  } else {
    started_ns_ = now_ns();
    shape_ = push;
    dense_bytes_.reset();
  }
  Contribution& part = parts_[push.rank].emplace();
  part.push = push;
  part.from = from;
  ++admitted_count_;
  count_leading();
  if (push.excluded_from_mean) ++uncounted_count_;
  if (part.present()) {
    dense_bytes_ = size.value();
    ++present_count_;
  }
  if (part.has_factors()) ++factors_count_;
  shape_.payload_bytes = dense_bytes_.value_or(0);
  if (reduction_.order == ReduceOrder::arrival) {
    position_of_[push.rank] = order_.size();
    order_.push_back(push.rank);
  }
  return {};
}

std::span<std::byte> ChunkState::place(std::uint32_t rank, Buffer buffer, std::shared_ptr<const void> turn) {
  one_thread_.check();
  Contribution& part = admitted(rank);
  invariant(!part.buffer && buffer.size() == part.push.payload_bytes, "a part gets its memory once, and all of it");
  part.buffer = std::move(buffer);
  part.payload = part.buffer.span();
  if (adds_on_arrival(part) && first_present() < position_of_[rank] && in_order(rank)) part.turn = std::move(turn);
  return part.buffer.span();
}

void ChunkState::progress(std::uint32_t rank, std::size_t received_bytes) {
  one_thread_.check();
  Contribution& part = admitted(rank);
  invariant(part.received_bytes <= received_bytes && received_bytes <= part.payload.size(),
            "a part grows, up to its size");
  part.received_bytes = received_bytes;
  if (streams()) advance(position_of_[rank]);
}

void ChunkState::complete(std::uint32_t rank, std::span<const std::byte> payload, std::function<void()> release) {
  one_thread_.check();
  Contribution& part = admitted(rank);
  invariant(payload.size() == part.push.payload_bytes, "a complete part has the size of its header");
  part.payload = payload;
  part.release = std::move(release);
  part.received_bytes = payload.size();
  part.complete = true;
  ++complete_count_;
  if (streams()) advance(position_of_[rank]);
}

std::size_t ChunkState::missing_sum_bytes(const wire::Contribution& push) const {
  if (push.float32_value) return sum_ ? 0 : push.value_bytes();
  const bool has_memory =
      sum_ || std::ranges::any_of(parts_, [](const auto& part) { return part && static_cast<bool>(part->buffer); });
  return has_memory ? 0 : push.payload_bytes;
}

/// A part whose header has come, and which is not complete.
Contribution& ChunkState::admitted(std::uint32_t rank) {
  invariant(rank < parts_.size() && parts_[rank] && !parts_[rank]->complete, "a part is admitted, then completes once");
  return *parts_[rank];
}

Contribution* ChunkState::at(std::size_t position) {
  if (position >= order_.size() || !parts_[order_[position]]) return nullptr;
  return &*parts_[order_[position]];
}

void ChunkState::count_leading() {
  while (leading_count_ < parts_.size() && parts_[leading_count_]) ++leading_count_;
}

/// Returns the part to which the others are added, or kNone as long as it is not certain.
std::size_t ChunkState::first_present() {
  for (std::size_t position = 0; Contribution* part = at(position); ++position)
    if (part->present()) return position;
  return kNone;
}

std::size_t ChunkState::available_bytes(const Contribution& part) const {
  const std::size_t grain = grain_bytes(shape_.dtype);
  return part.complete ? part.received_bytes : part.received_bytes / grain * grain;
}

/// Adds what can be added from `position` on. Its predecessor may have made it possible, and it may do so for others.
void ChunkState::advance(std::size_t position) {
  const std::size_t base = first_present();
  if (base == kNone || lost_ || at(base)->has_factors()) return;
  position = std::max(position, base);
  added_bytes_[base] = available_bytes(*at(base));
  std::size_t limit_bytes = added_bytes_[base];
  for (std::size_t before = position; before-- > base;) {
    const Contribution* part = at(before);
    if (part == nullptr) return;
    if (!part->present()) continue;
    limit_bytes = added_bytes_[before];
    break;
  }
  for (std::size_t next = std::max(position, base + 1); Contribution* part = at(next); ++next) {
    if (!part->present()) continue;
    const std::size_t end_bytes = std::min(limit_bytes, available_bytes(*part));
    if (part->has_factors() || end_bytes <= added_bytes_[next] || !claim_sum(*at(base))) return;
    const std::size_t last = group_end(next, end_bytes);
    add(next, last, end_bytes);
    next = last;
    limit_bytes = end_bytes;
  }
}

/// Returns the last of the positions that can be added over the same range in one pass.
std::size_t ChunkState::group_end(std::size_t position, std::size_t end_bytes) {
  std::size_t last = position;
  for (std::size_t next = position + 1; const Contribution* part = at(next); ++next) {
    if (!part->present()) continue;
    if (part->has_factors() || added_bytes_[next] != added_bytes_[position] || available_bytes(*part) < end_bytes)
      break;
    last = next;
  }
  return last;
}

void ChunkState::add(std::size_t first, std::size_t last, std::size_t end_bytes) {
  const std::size_t begin_bytes = added_bytes_[first];
  invariant(dense_bytes_ && begin_bytes < end_bytes && end_bytes <= *dense_bytes_, "a range is added within the chunk");
  const std::size_t base = first_present();
  if (second_ == kNone) second_ = first;  // no later part can be added before it
  const bool follows_base = first == second_;
  const std::byte* const base_data = at(base)->payload.data() + begin_bytes;
  std::vector<const std::byte*> inputs;
  if (follows_base) inputs.push_back(base_data);
  for (std::size_t position = first; position <= last; ++position)
    if (at(position)->present()) inputs.push_back(at(position)->payload.data() + begin_bytes);
  if (wide_sum_)
    add_wide(inputs, begin_bytes, end_bytes, follows_base);
  else
    add_narrow(std::move(inputs), begin_bytes, end_bytes, follows_base, last + 1 == parts_.size());
  for (std::size_t position = first; position <= last; ++position) {
    if (!at(position)->present()) continue;
    added_bytes_[position] = end_bytes;
    if (at(position)->complete && end_bytes == *dense_bytes_) free(*at(position));
  }
  if (end_bytes == *dense_bytes_) free(*at(base));  // its bytes are in the sum
}

/// `starts`: the first of the inputs is that of the sum.
void ChunkState::add_wide(std::span<const std::byte* const> inputs, std::size_t begin_bytes, std::size_t end_bytes,
                          bool starts) {
  const std::size_t first = begin_bytes / dtype_bytes(shape_.dtype);
  const std::size_t count = (end_bytes - begin_bytes) / dtype_bytes(shape_.dtype);
  std::byte* const sum = sum_.data() + first * kernel::running_sum_bytes(shape_.dtype);
  if (starts) kernel::start_sum(inputs.front(), sum, count, shape_.dtype);
  for (const std::byte* input : inputs.subspan(starts ? 1 : 0)) kernel::accumulate(input, sum, count, shape_.dtype);
}

/// The part that is added last divides the sum (`ends`). If that part is absent, take_sum divides. 16-bit parts come
/// here only if all are added in one pass, which divides.
void ChunkState::add_narrow(std::vector<const std::byte*> inputs, std::size_t begin_bytes, std::size_t end_bytes,
                            bool starts, bool ends) {
  if (!starts) inputs.insert(inputs.begin(), sum_.data() + begin_bytes);
  divided_ = ends || sums_wide(shape_.dtype);
  kernel::sum(inputs, sum_.data() + begin_bytes, (end_bytes - begin_bytes) / dtype_bytes(shape_.dtype), shape_.dtype,
              divided_ ? divisor() : 1);
}

/// Makes the first part's own memory the sum's memory if this shard owns it, which saves writing to new memory. A sum
/// of 16-bit parts has separate memory, unless all parts are here and are added in one pass. They also are if there was
/// no separate memory before. A sum that stays in float32 always has separate memory. Returns false if there is no
/// memory for it now.
bool ChunkState::claim_sum(Contribution& base) {
  if (sum_) return true;
  const bool last_chance = all_here() && factors_count_ == 0;
  wide_sum_ = sums_wide(shape_.dtype) && (!last_chance || shape_.float32_value);
  if (wide_sum_) {
    const std::size_t sum_bytes = *dense_bytes_ / dtype_bytes(shape_.dtype) * kernel::running_sum_bytes(shape_.dtype);
    sum_ = last_chance ? pool_->take(sum_bytes) : pool_->try_take(sum_bytes);
    return static_cast<bool>(sum_);
  }
  sum_ = base.buffer ? std::move(base.buffer) : pool_->take(*dense_bytes_);
  return true;
}

void ChunkState::free(Contribution& part) {
  if (part.release) std::exchange(part.release, nullptr)();
  pool_->give_back(std::move(part.buffer));
  part.turn.reset();
}

Buffer ChunkState::take_sum() {
  one_thread_.check();
  invariant(all_here() && any_present() && dense_bytes_, "a sum is taken when all parts are here, and one is present");
  const std::size_t base = first_present();
  advance(base + 1);
  const std::size_t element_count = *dense_bytes_ / dtype_bytes(shape_.dtype);
  if (shape_.float32_value) {
    const bool only_one = !sum_;  // nothing has been added to it
    if (only_one && claim_sum(*at(base)))
      kernel::start_sum(at(base)->payload.data(), sum_.data(), element_count, shape_.dtype);
    const std::byte* const undivided = sum_.data();
    kernel::sum({&undivided, 1}, sum_.data(), sum_.size() / sizeof(float), DType::float32, divisor());
    return std::move(sum_);
  }
  if (wide_sum_) {
    Buffer out = pool_->take(*dense_bytes_);
    kernel::finish_sum(sum_.data(), out.data(), element_count, shape_.dtype, divisor());
    return out;
  }
  if (!divided_) {
    const std::byte* undivided = sum_ ? sum_.data() : at(base)->payload.data();
    claim_sum(*at(base));
    kernel::sum({&undivided, 1}, sum_.data(), element_count, shape_.dtype, divisor());
  }
  return std::move(sum_);
}

std::vector<const std::byte*> ChunkState::dense_inputs() {
  one_thread_.check();
  std::vector<const std::byte*> inputs;
  for (std::size_t position = 0; const Contribution* part = at(position); ++position)
    if (part->present()) inputs.push_back(part->payload.data());
  return inputs;
}

/// A divisor that is a multiple of the number of ranks stands for a mean over all ranks. The mean is then over the
/// ranks that count.
unsigned ChunkState::divisor() const {
  const auto worker_count = static_cast<unsigned>(parts_.size());
  if (uncounted_count_ == 0 || shape_.divisor % worker_count != 0) return shape_.divisor;
  const auto counted = worker_count - static_cast<unsigned>(uncounted_count_);
  return shape_.divisor / worker_count * std::max(1U, counted);
}

bool ChunkState::is_mean() const {
  return started() && shape_.divisor % parts_.size() == 0 && dtype_is_floating(shape_.dtype) && factors_count_ == 0 &&
         !shape_.transient;
}

std::vector<Contribution> ChunkState::leave_out_missing() {
  one_thread_.check();
  std::vector<Contribution> begun;
  for (std::uint32_t rank = 0; rank < parts_.size(); ++rank) {
    auto& part = parts_[rank];
    if (part && part->complete) continue;
    if (part) {
      present_count_ -= part->present() ? 1 : 0;
      uncounted_count_ -= part->push.excluded_from_mean ? 1 : 0;
      begun.push_back(std::move(*part));
    } else {
      ++admitted_count_;
    }
    Contribution& nothing = part.emplace();
    nothing.push.absent = true;
    nothing.push.rank = rank;
    nothing.complete = true;
    ++complete_count_;
    ++uncounted_count_;
    left_out_.push_back(rank);
  }
  count_leading();
  if (present_count_ == 0) dense_bytes_.reset();
  shape_.payload_bytes = dense_bytes_.value_or(0);
  return begun;
}

std::uint32_t ChunkState::factor_count_sum() const {
  std::uint64_t total = 0;
  invariant(all_here(), "factors are counted when all parts are here");
  for (const auto& part : parts_) total += part->push.factor_count;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(total, wire::kUnboundedFactors));
}

std::vector<kernel::FactorTerm> ChunkState::factor_terms() {
  one_thread_.check();
  invariant(all_here() && dense_bytes_, "factors are multiplied when all parts are here");
  std::vector<kernel::FactorTerm> terms;
  for (std::size_t position = 0; const Contribution* part = at(position); ++position) {
    if (!part->present()) continue;
    kernel::FactorTerm term;
    term.dtype = part->push.dtype;
    if (part->has_factors()) {
      term.left = part->payload.data();
      term.right = term.left + std::size_t{part->push.factor_count} * shape_.rows * dtype_bytes(term.dtype);
      term.count = part->push.factor_count;
    } else if (sum_ && added_bytes_[position] == *dense_bytes_) {
      terms.clear();  // the dense parts so far are one term
      term.dense = sum_.data();
      if (wide_sum_) term.dtype = DType::float32;
    } else {
      term.dense = part->payload.data();
    }
    terms.push_back(term);
  }
  return terms;
}

bool ChunkState::adds_on_arrival(const Contribution& part) const {
  return streams() && !part.has_factors() && factors_count_ == 0;
}

bool ChunkState::in_order(std::uint32_t rank) const {
  return reduction_.order == ReduceOrder::arrival || rank <= leading_count_;
}

std::vector<std::uint32_t> ChunkState::missing_ranks() const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < parts_.size(); ++rank)
    if (!parts_[rank] || !parts_[rank]->complete) ranks.push_back(rank);
  return ranks;
}

void ChunkState::reset() {
  for (auto& part : parts_) {
    if (part) free(*part);
    part.reset();
  }
  if (sum_) pool_->give_back(std::move(sum_));
  admitted_count_ = complete_count_ = present_count_ = factors_count_ = uncounted_count_ = leading_count_ = 0;
  second_ = kNone;
  left_out_.clear();
  aggregator_ = nullptr;
  lost_ = wide_sum_ = divided_ = false;
  added_bytes_.assign(parts_.size(), 0);
  position_of_.resize(parts_.size());
  order_.clear();
  if (reduction_.order == ReduceOrder::arrival) return;
  order_.resize(parts_.size());
  std::iota(order_.begin(), order_.end(), 0U);
  std::iota(position_of_.begin(), position_of_.end(), std::size_t{0});
}

void ChunkState::drop(const Requester* from) {
  one_thread_.check();
  if (!started()) return;  // when many leave, most chunks are between two steps
  for (auto& part : parts_) {
    if (!part || part->from != from) continue;
    // Without its owner the step cannot end. A part that has been added cannot be taken out again; the others can.
    if (sum_ || reduction_.order == ReduceOrder::arrival) lost_ = true;
    invariant(admitted_count_ > 0 && complete_count_ <= admitted_count_, "a part leaves a step that has it");
    --admitted_count_;
    complete_count_ -= part->complete ? 1 : 0;
    present_count_ -= part->present() ? 1 : 0;
    factors_count_ -= part->has_factors() ? 1 : 0;
    uncounted_count_ -= part->push.excluded_from_mean ? 1 : 0;
    added_bytes_[position_of_[part->push.rank]] = 0;
    leading_count_ = std::min<std::size_t>(leading_count_, part->push.rank);
    free(*part);
    part.reset();
  }
  if (present_count_ == 0) dense_bytes_.reset();
  if (!started()) reset();
}

void ChunkState::orphan(const Requester* from) {
  one_thread_.check();
  for (auto& part : parts_)
    if (part && part->from == from) part->from = nullptr;
}

}  // namespace poseidon
