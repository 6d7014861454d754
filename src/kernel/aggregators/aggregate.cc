#include "kernel/aggregators/aggregate.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/invariant.h"
#include "kernel/arithmetic.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {

namespace {

// How many elements the aggregator gets at once. It limits the memory for arrays that have to be converted.
constexpr std::size_t kBlock = 2048;

template <typename T>
void aggregate_as(const std::function<void(const AggregateCall<T>&)>& aggregate_block,
                  std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
                  unsigned divisor) {
  const std::vector<T> zeros(kBlock);
  std::vector<T> result(kBlock);
  std::vector<T> converted(is_half(dtype) ? inputs.size() * kBlock : 0);
  std::vector<std::span<const T>> contributions(inputs.size());
  for (std::size_t first = 0; first < element_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, element_count - first);
    const std::size_t first_bytes = first * dtype_bytes(dtype);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const T* block = zeros.data();
      if (inputs[i] != nullptr && is_half(dtype)) {
        T* const wide = converted.data() + i * kBlock;
        start_sum(inputs[i] + first_bytes, reinterpret_cast<std::byte*>(wide), n, dtype);
        block = wide;
      } else if (inputs[i] != nullptr) {
        block = reinterpret_cast<const T*>(inputs[i] + first_bytes);
      }
      contributions[i] = {block, n};
    }
    aggregate_block({contributions, std::span(result).first(n)});
    finish_sum(reinterpret_cast<const std::byte*>(result.data()), out + first_bytes, n, dtype, divisor);
  }
}

}  // namespace

void aggregate(const Aggregator& aggregator, std::span<const std::byte* const> inputs, std::byte* out,
               std::size_t element_count, DType dtype, unsigned divisor) {
  invariant(!inputs.empty() && divisor > 0 && dtype_is_floating(dtype), "contributions are of a floating-point type");
  if (dtype == DType::float64)
    aggregate_as<double>(aggregator.aggregate_float64, inputs, out, element_count, dtype, divisor);
  else
    aggregate_as<float>(aggregator.aggregate_float32, inputs, out, element_count, dtype, divisor);
}

}  // namespace poseidon::kernel
