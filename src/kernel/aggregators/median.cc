// median: the coordinate-wise median of the contributions.
#include <algorithm>
#include <vector>

#include "kernel/aggregators/built_in.h"

namespace poseidon::kernel {

namespace {

// How many elements are sorted together. Their rows stay in the L1 and L2 caches.
constexpr std::size_t kBlock = 256;

/// Puts the smaller of each pair into `low` and the larger one into `high`. NaN is larger than every number.
template <typename T>
POSEIDON_INLINE void order_pairs(T* low, T* high, std::size_t n) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    const T first = low[i];
    const T second = high[i];
    const bool swaps = second < first || first != first;
    low[i] = swaps ? second : first;
    high[i] = swaps ? first : second;
  }
}

/// Sorts the columns of `count` rows of kBlock elements, from the last row down to the lower one of the middle rows.
/// Compare-and-swap over whole rows becomes vector code, which a sort of each column does not.
template <typename T>
POSEIDON_INLINE void median_of_rows(T* rows, std::size_t count, T* result, std::size_t n) {
  const std::size_t middle = (count - 1) / 2;
  for (std::size_t last = count - 1; last > 0 && last >= middle; --last)
    for (std::size_t row = 0; row < last; ++row) order_pairs(rows + row * kBlock, rows + (row + 1) * kBlock, n);
  const T* const lower = rows + middle * kBlock;
  const T* const upper = rows + count / 2 * kBlock;
  if (lower == upper)
    std::copy_n(lower, n, result);
  else
    for (std::size_t i = 0; i < n; ++i) result[i] = (lower[i] + upper[i]) / 2;
}

template <typename T>
void aggregate_median(Isa isa, const AggregateCall<T>& call) {
  const std::size_t count = call.contributions.size();
  std::vector<T> rows(count * kBlock);
  for (std::size_t first = 0; first < call.result.size(); first += kBlock) {
    const std::size_t n = std::min(kBlock, call.result.size() - first);
    for (std::size_t row = 0; row < count; ++row)
      std::copy_n(call.contributions[row].data() + first, n, rows.data() + row * kBlock);
    run_with(
        isa, [ count, n, all = rows.data(), result = call.result.data() + first ](auto)
                 __attribute__((always_inline)) { median_of_rows(all, count, result, n); });
  }
}

}  // namespace

BuiltInAggregator median() { return {"median", aggregate_median<float>, aggregate_median<double>}; }

}  // namespace poseidon::kernel
