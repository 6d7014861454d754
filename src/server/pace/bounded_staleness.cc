#include "server/pace/bounded_staleness.h"

#include <utility>

#include "kernel/kernel.h"
#include "server/chunk/no_room.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

Status BoundedStaleness::admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) {
  // A step that has begun in the chunk's state is finished there.
  if (!chunk.state.started() && push.stored) applies_each_push_ = true;
  if (!applies_each_push_) return WaitForAll::admit(chunk, push, from);
  const auto size_bytes = contribution_bytes(push, worker_count_);
  if (!size_bytes.ok()) return size_bytes.status();
  if (push.kind != wire::Kind::push || !push.stored || !chunk.has_rule(push))
    return refused_push(
        push,
        "with consistency=ssp or async the server applies each push alone: the gradient must be dense, and this "
        "rank must have sent an update rule before");
  return clocks_.admit(push);
}

std::span<std::byte> BoundedStaleness::place(PacedChunk& chunk, const wire::Contribution& push, Requester& from,
                                             Buffer buffer, std::shared_ptr<const void> turn) {
  if (!applies_each_push_) return WaitForAll::place(chunk, push, from, std::move(buffer), std::move(turn));
  return clocks_.incoming.place(push.rank, &from, std::move(buffer));
}

void BoundedStaleness::progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) {
  if (!applies_each_push_) WaitForAll::progress(chunk, push, received_bytes);
}

void BoundedStaleness::complete(PacedChunk& chunk, const wire::Contribution& push) {
  if (!applies_each_push_) return WaitForAll::complete(chunk, push);
  IncomingParts::Part part = clocks_.incoming.take(push.rank);
  const std::span<const std::byte> payload = part.buffer.span();
  finish(chunk, push, *part.from, std::move(part.buffer), payload);
}

void BoundedStaleness::add(PacedChunk& chunk, const wire::Contribution& push, Requester& from,
                           std::span<const std::byte> payload, std::function<void()> release) {
  if (!applies_each_push_) return WaitForAll::add(chunk, push, from, payload, std::move(release));
  finish(chunk, push, from, Buffer(), payload);
  if (release) release();
}

/// `payload` is in `buffer`, or lent.
void BoundedStaleness::finish(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
                              std::span<const std::byte> payload) {
  const Status status = apply(chunk, push, std::move(buffer), payload);
  if (!status.ok()) return from.refuse(push, status);
  clocks_.tick(push, from);
  answer_released(chunk);
}

/// Applies the gradient of one rank. The divisor makes it that rank's share of a mean.
Status BoundedStaleness::apply(PacedChunk& chunk, const wire::Contribution& push, Buffer buffer,
                               std::span<const std::byte> payload) {
  if (push.absent) return {};
  const bool fits_here = buffer && !push.float32_value;
  Buffer sum = fits_here ? std::exchange(buffer, Buffer()) : pool_->try_take(push.value_bytes());
  const std::byte* gradient = payload.data();
  if (sum && push.float32_value) {
    kernel::start_sum(gradient, sum.data(), payload.size() / dtype_bytes(push.dtype), push.dtype);
    gradient = sum.data();
  }
  pool_->give_back(std::move(buffer));
  if (!sum) return no_room(*pool_, push.value_bytes());
  kernel::sum({&gradient, 1}, sum.data(), sum.size() / dtype_bytes(push.value_dtype()), push.value_dtype(),
              push.divisor);
  return chunk.update(push, std::move(sum));
}

/// Answers the released pushes with the chunk's current value. It has everything that all ranks had pushed when the
/// answer was allowed.
void BoundedStaleness::answer_released(PacedChunk& chunk) {
  for (const RankClocks::Waiting& one : clocks_.release()) {
    auto value = chunk.value(one.push);
    wire::StepResult result;
    result.dtype = one.push.result_dtype();
    result.absent = value == nullptr;
    result.factor_count = one.push.factor_count;
    one.to->send(result.make(one.push), one.push.wants_result ? std::move(value) : nullptr);
  }
}

void BoundedStaleness::drop(PacedChunk& /*chunk*/, const Requester& from) {
  clocks_.drop(&from);
  clocks_.incoming.drop(&from, *pool_);
}

void BoundedStaleness::add_waiting(std::int64_t since_before_ns, std::vector<OpenChunk>& waiting) const {
  for (const RankClocks::Waiting& one : clocks_.waiting())
    if (one.since_ns < since_before_ns)
      waiting.push_back({one.push, one.since_ns, clocks_.ranks_behind(one.push.step)});
}

StaleShard::StaleShard(const wire::Pace& pace, PaceSurroundings surroundings)
    : ShardPace({.applies_each_push = true,
                 .bytes_of_a_chunk = sizeof(BoundedStaleness) + surroundings.worker_count * sizeof(std::uint64_t)}),
      staleness_(pace.consistency == Consistency::ssp ? std::optional(pace.bound) : std::nullopt),
      surroundings_(std::move(surroundings)) {}

std::shared_ptr<ChunkPace> StaleShard::chunk_pace(PacedChunk& /*chunk*/) {
  return std::make_shared<BoundedStaleness>(surroundings_.worker_count, staleness_, surroundings_.pool);
}

}  // namespace poseidon
