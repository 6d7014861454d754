#include "server/pace/bounded_staleness.h"

#include <string>
#include <utility>

#include "kernel/kernel.h"
#include "server/chunk/no_room.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

Status BoundedStaleness::admit(PacedChunk& chunk, const wire::Header& header, Requester& from) {
  // What is under way in the chunk's state stays there.
  if (!chunk.state.started() && (header.flags & wire::kStored) != 0) applies_each_push_ = true;
  if (!applies_each_push_) return WaitForAll::admit(chunk, header, from);
  const auto size_bytes = contribution_bytes(header, worker_count_);
  if (!size_bytes.ok()) return size_bytes.status();
  if (header.kind != wire::Kind::push || (header.flags & wire::kStored) == 0 || !chunk.has_rule(header))
    return refused_push(
        header,
        "with consistency=ssp and async pushes are applied one by one, which takes a dense gradient and "
        "an update rule that this rank has sent");
  return clocks_.admit(header);
}

std::span<std::byte> BoundedStaleness::place(PacedChunk& chunk, const wire::Header& header, Requester& from,
                                             Buffer buffer, std::shared_ptr<const void> turn) {
  if (!applies_each_push_) return WaitForAll::place(chunk, header, from, std::move(buffer), std::move(turn));
  return clocks_.in_flight.place(header.rank, &from, std::move(buffer));
}

void BoundedStaleness::progress(PacedChunk& chunk, const wire::Header& header, std::size_t received_bytes) {
  if (!applies_each_push_) WaitForAll::progress(chunk, header, received_bytes);
}

void BoundedStaleness::complete(PacedChunk& chunk, const wire::Header& header) {
  if (!applies_each_push_) return WaitForAll::complete(chunk, header);
  PartsInFlight::Part part = clocks_.in_flight.take(header.rank);
  const std::span<const std::byte> payload = part.buffer.span();
  finish(chunk, header, *part.from, std::move(part.buffer), payload);
}

void BoundedStaleness::add(PacedChunk& chunk, const wire::Header& header, Requester& from,
                           std::span<const std::byte> payload, std::function<void()> release) {
  if (!applies_each_push_) return WaitForAll::add(chunk, header, from, payload, std::move(release));
  finish(chunk, header, from, Buffer(), payload);
  if (release) release();
}

/// `payload` is in `buffer`, or lent.
void BoundedStaleness::finish(PacedChunk& chunk, const wire::Header& header, Requester& from, Buffer buffer,
                              std::span<const std::byte> payload) {
  const Status status = apply(chunk, header, std::move(buffer), payload);
  if (!status.ok()) return from.refuse(header, status);
  clocks_.tick(header, from);
  answer_released(chunk);
}

/// One rank's gradient, which the divisor makes its share of a mean.
Status BoundedStaleness::apply(PacedChunk& chunk, const wire::Header& header, Buffer buffer,
                               std::span<const std::byte> payload) {
  if ((header.flags & wire::kAbsent) != 0) return {};
  if (!buffer) buffer = pool_->try_take(payload.size());
  if (!buffer) return no_room(*pool_, payload.size());
  const std::byte* gradient = payload.data();
  kernel::sum({&gradient, 1}, buffer.data(), payload.size() / dtype_bytes(header.dtype), header.dtype, header.divisor);
  return chunk.update(header, std::move(buffer));
}

/// With what the chunk's value is now: it has what all ranks had pushed when the answer could go.
void BoundedStaleness::answer_released(PacedChunk& chunk) {
  for (const RankClocks::Waiting& one : clocks_.release()) {
    wire::Header header = one.header;
    header.kind = wire::Kind::result;
    auto value = chunk.value();
    header.flags = static_cast<std::uint8_t>(value ? 0 : wire::kAbsent);
    one.to->send(header, (one.header.flags & wire::kNoResult) == 0 ? std::move(value) : nullptr);
  }
}

void BoundedStaleness::drop(PacedChunk& /*chunk*/, const Requester& from) {
  clocks_.drop(&from);
  clocks_.in_flight.drop(&from, *pool_);
}

void BoundedStaleness::add_waiting(std::int64_t since_before_ns, std::vector<OpenChunk>& waiting) const {
  for (const RankClocks::Waiting& one : clocks_.waiting())
    if (one.since_ns < since_before_ns)
      waiting.push_back({one.header, one.since_ns, clocks_.ranks_behind(one.header.step)});
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
