#include "server/baselines/wide_aggregation.h"

#include <utility>

#include "kernel/kernel.h"

namespace poseidon {

Completion WideAggregation::sum(std::vector<const std::byte*> inputs, const wire::Contribution& shape, std::byte* out,
                                std::function<void()> done) {
  const std::size_t element_bytes = dtype_bytes(shape.dtype);
  const std::size_t element_count = shape.payload_bytes / element_bytes;
  const auto part_count = static_cast<std::size_t>(executor_.thread_count());
  const Completion computed = Completion::make();
  executor_.run(
      part_count,
      [=, inputs = std::move(inputs)](std::size_t part) {
        const std::size_t begin = element_count * part / part_count;
        const std::size_t end = element_count * (part + 1) / part_count;
        std::vector<const std::byte*> slices;
        slices.reserve(inputs.size());
        for (const std::byte* input : inputs) slices.push_back(input + begin * element_bytes);
        kernel::sum(slices, out + begin * element_bytes, end - begin, shape.dtype, shape.divisor);
      },
      [done = std::move(done), computed] {
        done();
        computed.complete();
      });
  return computed;
}

}  // namespace poseidon
