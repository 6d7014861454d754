#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernel/dispatch.h"
#include "kernel/half.h"
#include "kernel/kernel.h"
#include "kernel/kernel_isa.h"

namespace poseidon::kernel {
namespace {

// Elements that go through all inputs together: the running sum stays in the L1 cache, so that
// memory is read once per input and written once.
constexpr std::size_t kBlockBytes = 8192;
// Arrays read by one loop; more would not fit the registers and prefetch streams of every CPU.
constexpr std::size_t kGroupInputs = 4;

template <typename T>
using Group = std::array<const T*, kGroupInputs>;

template <typename T>
POSEIDON_INLINE T add(T a, T b) {
  return static_cast<T>(a + b);
}

/// out[i] = in[0][i] + … + in[input_count - 1][i], from left to right; input_count in [1, kGroupInputs].
template <typename T>
POSEIDON_INLINE void add_group(Group<T> in, std::size_t input_count, T* out, std::size_t n) {
  const auto [a, b, c, d] = in;
  switch (input_count) {
    case 1:
      if (out != a) std::memmove(out, a, n * sizeof(T));
      break;
    case 2:
      POSEIDON_INDEPENDENT_ELEMENTS
      for (std::size_t i = 0; i < n; ++i) out[i] = add(a[i], b[i]);
      break;
    case 3:
      POSEIDON_INDEPENDENT_ELEMENTS
      for (std::size_t i = 0; i < n; ++i) out[i] = add(add(a[i], b[i]), c[i]);
      break;
    default:
      POSEIDON_INDEPENDENT_ELEMENTS
      for (std::size_t i = 0; i < n; ++i) out[i] = add(add(add(a[i], b[i]), c[i]), d[i]);
      break;
  }
}

template <typename T>
POSEIDON_INLINE void divide(T* values, std::size_t n, unsigned divisor) {
  if (divisor == 1) return;
  if (std::has_single_bit(divisor)) {
    const T reciprocal = T{1} / static_cast<T>(divisor);
    for (std::size_t i = 0; i < n; ++i) values[i] *= reciprocal;
  } else {
    const T denominator = static_cast<T>(divisor);
    for (std::size_t i = 0; i < n; ++i) values[i] /= denominator;
  }
}

/// One block: `inputs` are summed into `out`, through `running` because `out` may be an input.
template <typename T>
POSEIDON_INLINE void sum_block(const std::byte* const* inputs, std::size_t input_count, std::size_t first,
                               std::size_t n, T* running, T* out) {
  Group<T> group{};
  std::size_t filled = 0;
  for (std::size_t i = 0; i < input_count; ++i) {
    group[filled++] = reinterpret_cast<const T*>(inputs[i]) + first;
    const bool last = i + 1 == input_count;
    if (!last && filled < kGroupInputs) continue;
    add_group(group, filled, last ? out : running, n);
    group[0] = running;
    filled = 1;
  }
}

template <typename T>
void sum_wide(Isa isa, std::span<const std::byte* const> inputs, std::byte* out_bytes, std::size_t element_count,
              unsigned divisor) {
  const std::byte* const* in = inputs.data();
  const std::size_t input_count = inputs.size();
  T* const out = reinterpret_cast<T*>(out_bytes);
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        constexpr std::size_t block = kBlockBytes / sizeof(T);
        alignas(64) T running[block];
        for (std::size_t first = 0; first < element_count; first += block) {
          const std::size_t n = std::min(block, element_count - first);
          sum_block<T>(in, input_count, first, n, running, out + first);
          if constexpr (std::is_floating_point_v<T>) divide(out + first, n, divisor);
        }
      });
}

void sum_half(Isa isa, std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
              unsigned divisor) {
  constexpr std::size_t block = kBlockBytes / sizeof(float);
  alignas(64) float running[block];
  alignas(64) float next[block];
  for (std::size_t first = 0; first < element_count; first += block) {
    const std::size_t n = std::min(block, element_count - first);
    const std::size_t offset_bytes = first * dtype_bytes(dtype);
    widen(isa, dtype, inputs[0] + offset_bytes, running, n);
    for (const std::byte* input : inputs.subspan(1)) {
      widen(isa, dtype, input + offset_bytes, next, n);
      run_with(
          isa, [ =, a = running, b = next ](auto) __attribute__((always_inline)) {
            add_group<float>({a, b}, 2, a, n);
          });
    }
    run_with(
        isa, [ =, values = running ](auto) __attribute__((always_inline)) { divide(values, n, divisor); });
    narrow(isa, dtype, running, out + offset_bytes, n);
  }
}

}  // namespace

void sum_with(Isa isa, std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
              unsigned divisor) {
  switch (dtype) {
    case DType::float32:
      return sum_wide<float>(isa, inputs, out, element_count, divisor);
    case DType::float64:
      return sum_wide<double>(isa, inputs, out, element_count, divisor);
    case DType::float16:
    case DType::bfloat16:
      return sum_half(isa, inputs, out, element_count, dtype, divisor);
    case DType::uint8:
      return sum_wide<std::uint8_t>(isa, inputs, out, element_count, divisor);
    case DType::int32:  // unsigned: wraps by definition
      return sum_wide<std::uint32_t>(isa, inputs, out, element_count, divisor);
    case DType::int64:
      return sum_wide<std::uint64_t>(isa, inputs, out, element_count, divisor);
  }
}

void sum(std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
         unsigned divisor) {
  sum_with(best_isa(), inputs, out, element_count, dtype, divisor);
}

}  // namespace poseidon::kernel
