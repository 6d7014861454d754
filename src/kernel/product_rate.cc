#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/clock.h"
#include "kernel/kernel.h"
#include "poseidon/measure.h"

namespace poseidon {

double multiply_adds_per_second() {
  constexpr std::size_t side = 256;   // the result has the size of a core's second-level cache
  constexpr std::size_t count = 128;  // long enough that starting the product does not matter
  constexpr int rounds = 3;           // the fastest counts: whatever else runs only takes time
  const std::vector<float> factors(side * count, 1.0F);
  std::vector<float> result(side * side);
  kernel::FactorTerm term;
  term.left = term.right = std::as_bytes(std::span(factors)).data();
  term.count = count;
  std::int64_t least_ns = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t begun_ns = now_ns();
    kernel::factor_product({&term, 1}, std::as_writable_bytes(std::span(result)).data(), DType::float32, side, side, 0,
                           side, 1, false);
    const std::int64_t took_ns = std::max<std::int64_t>(1, now_ns() - begun_ns);
    least_ns = round == 0 ? took_ns : std::min(least_ns, took_ns);
  }
  return static_cast<double>(side * side * count) * 1e9 / static_cast<double>(least_ns);
}

}  // namespace poseidon
