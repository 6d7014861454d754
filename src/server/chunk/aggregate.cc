#include "server/chunk/aggregate.h"

#include <algorithm>
#include <vector>

#include "kernel/aggregators/aggregate.h"
#include "server/chunk/no_room.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

namespace {

/// Returns the parts' memory in rank order. Null stands for zeros.
std::vector<const std::byte*> counted_inputs(const ChunkState& state) {
  std::vector<const std::byte*> inputs;
  for (const auto& part : state.parts()) {
    const bool left_out = std::ranges::find(state.left_out(), part->push.rank) != state.left_out().end();
    if (part->present())
      inputs.push_back(part->payload.data());
    else if (!left_out && !part->push.excluded_from_mean)
      inputs.push_back(nullptr);
  }
  return inputs;
}

}  // namespace

Result<Buffer> aggregate(const ChunkState& state, BufferPool& pool) {
  const Aggregator& aggregator = *state.aggregator();
  const wire::Contribution& shape = state.shape();
  const auto worker_count = static_cast<std::uint32_t>(state.parts().size());
  if (state.is_product() || !dtype_is_floating(shape.dtype) || shape.divisor % worker_count != 0)
    return refused_push(shape, "the aggregator " + aggregator.name +
                                   " takes the place of a mean over all ranks, so it needs dense gradients of a "
                                   "floating-point type and a divisor that is a multiple of the number of ranks");
  if (shape.float32_value)
    return refused_push(shape, "the aggregator " + aggregator.name +
                                   " takes gradients of the value's own type, not gradients in fewer bits; use wire "
                                   "fp32 and float32 parameters");
  Buffer out = pool.try_take(shape.payload_bytes);
  if (!out) return no_room(pool, shape.payload_bytes);
  kernel::aggregate(aggregator, counted_inputs(state), out.data(), shape.payload_bytes / dtype_bytes(shape.dtype),
                    shape.dtype, shape.divisor / worker_count);
  return out;
}

}  // namespace poseidon
