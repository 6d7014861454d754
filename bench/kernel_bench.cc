// What the kernels reach on one core: sums against a memory copy of the same traffic, factor products
// in GFLOP/s. Prints a table; each figure is the best of several rounds.
// `make core-bench` builds and runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "base/clock.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

constexpr int kRounds = 7;

/// Seconds of one call of `work`, best of kRounds rounds of at least 20 ms.
template <typename Work>
double best_seconds(const Work& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t begin = now_ns();
    std::int64_t end = begin;
    int calls = 0;
    for (; end - begin < 20'000'000; end = now_ns(), ++calls) work();
    best = std::min(best, static_cast<double>(end - begin) * 1e-9 / calls);
  }
  return best;
}

void bench_sum(DType dtype, std::size_t size_bytes) {
  constexpr std::size_t input_count = 8;
  std::vector<std::vector<std::byte>> arrays(input_count, std::vector<std::byte>(size_bytes));
  std::vector<std::byte> out(size_bytes);
  std::vector<const std::byte*> inputs;
  for (const auto& array : arrays) inputs.push_back(array.data());
  const double sum_seconds = best_seconds([&] { sum(inputs, out.data(), size_bytes / dtype_bytes(dtype), dtype, 8); });
  const double copy_seconds = best_seconds([&] {
    for (const std::byte* input : inputs) std::memcpy(out.data(), input, size_bytes);
  });
  const double gigabytes = static_cast<double>(input_count * size_bytes) * 1e-9;
  std::printf("sum of 8   %-9s %8zu KiB  %7.1f GB/s read   memcpy %7.1f GB/s   ratio %.2f\n", dtype_name(dtype).data(),
              size_bytes >> 10, gigabytes / sum_seconds, gigabytes / copy_seconds, copy_seconds / sum_seconds);
}

void bench_product(DType dtype, std::size_t rows, std::size_t cols, std::size_t factor_count, std::size_t term_count) {
  const std::size_t element_bytes = dtype_bytes(dtype);
  std::vector<std::byte> left(factor_count * rows * element_bytes);
  std::vector<std::byte> right(factor_count * cols * element_bytes);
  std::vector<std::byte> out(rows * cols * element_bytes);
  FactorTerm term;
  term.dtype = dtype;
  term.left = left.data();
  term.right = right.data();
  term.count = factor_count / term_count;
  const std::vector<FactorTerm> terms(term_count, term);
  const double seconds = best_seconds([&] { factor_product(terms, out.data(), dtype, rows, cols, 0, rows, 1, false); });
  const double flops = 2.0 * static_cast<double>(rows * cols) * static_cast<double>(term.count * term_count);
  std::printf("product    %-9s %5zu x %5zu  K %4zu in %zu terms  %7.2f ms  %7.1f GFLOP/s\n", dtype_name(dtype).data(),
              rows, cols, term.count * term_count, term_count, seconds * 1e3, flops / seconds * 1e-9);
}

}  // namespace
}  // namespace poseidon::kernel

int main() {
  using poseidon::DType;
  namespace kernel = poseidon::kernel;
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    for (const std::size_t size_bytes : {std::size_t{32} << 10, std::size_t{2} << 20})
      kernel::bench_sum(dtype, size_bytes);
  }
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    kernel::bench_product(dtype, 1024, 6272, 64, 8);
    kernel::bench_product(dtype, 1000, 1024, 512, 4);
  }
}
