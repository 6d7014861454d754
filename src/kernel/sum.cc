#include <algorithm>
#include <array>
#include <cstring>

#include "base/invariant.h"
#include "kernel/arithmetic.h"
#include "kernel/dispatch.h"
#include "kernel/half_sum.h"
#include "kernel/int8_blocks.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

// How many bytes of `out` all groups of inputs process together. The running sum then stays in the L1 cache, so that
// memory is read once per input and written once.
constexpr std::size_t kBlockBytes = 8192;

/// out[i] = (arrays[0][i] + arrays[1][i] + …) · factor. Integers ignore the factor.
template <typename T>
POSEIDON_INLINE void add_arrays(const std::array<const T*, kMaxArrays>& arrays, std::size_t count, T factor, T* out,
                                std::size_t n) {
  with_arrays(
      arrays, count, [=](const auto*... in) __attribute__((always_inline)) {
        POSEIDON_INDEPENDENT_ELEMENTS
        for (std::size_t i = 0; i < n; ++i) {
          out[i] = static_cast<T>((... + in[i]));
          if constexpr (std::is_floating_point_v<T>) out[i] *= factor;
        }
      });
}

/// Sums elements [first, first + n). Groups of inputs are added through `running`, because `out` may be an input.
template <typename T>
POSEIDON_INLINE void sum_block(const std::byte* const* inputs, std::size_t input_count, std::size_t first,
                               std::size_t n, T* running, T* out, const Divisor<T>& divisor) {
  std::array<const T*, kMaxArrays> group{};
  std::size_t filled = 0;
  for (std::size_t i = 0; i < input_count; ++i) {
    group[filled++] = reinterpret_cast<const T*>(inputs[i]) + first;
    const bool last = i + 1 == input_count;
    if (!last && filled < kMaxArrays) continue;
    add_arrays(group, filled, last ? divisor.factor() : T{1}, last ? out : running, n);
    group[0] = running;
    filled = 1;
  }
  if (!divisor.exact_reciprocal) divide(out, n, divisor);
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
        const Divisor<T> division(divisor);
        for (std::size_t first = 0; first < element_count; first += block) {
          const std::size_t n = std::min(block, element_count - first);
          sum_block<T>(in, input_count, first, n, running, out + first, division);
        }
      });
}

/// Allows null for empty arrays, which memcpy does not.
void copy_bytes(const std::byte* in, std::byte* out, std::size_t size_bytes) {
  if (size_bytes > 0) std::memcpy(out, in, size_bytes);
}

template <typename T>
void accumulate_wide(Isa isa, const std::byte* input_bytes, std::byte* sum_bytes, std::size_t element_count) {
  const T* const input = reinterpret_cast<const T*>(input_bytes);
  T* const sum = reinterpret_cast<T*>(sum_bytes);
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        POSEIDON_INDEPENDENT_ELEMENTS
        for (std::size_t i = 0; i < element_count; ++i) sum[i] = static_cast<T>(sum[i] + input[i]);
      });
}

template <typename T>
void divide_wide(Isa isa, const std::byte* sum_bytes, std::byte* out_bytes, std::size_t element_count,
                 unsigned divisor) {
  if (out_bytes != sum_bytes) copy_bytes(sum_bytes, out_bytes, element_count * sizeof(T));
  T* const out = reinterpret_cast<T*>(out_bytes);
  run_with(
      isa, [=](auto) __attribute__((always_inline)) { divide(out, element_count, Divisor<T>(divisor)); });
}

// How many values are rounded at a time. They stay in the L1 cache, and are whole elements of every type.
constexpr std::size_t kRoundedValues = 1024;

/// Divides `sum`, which is float32, and rounds to `dtype`.
void divide_and_round(Isa isa, const std::byte* sum, std::byte* out, std::size_t element_count, DType dtype,
                      unsigned divisor) {
  const Divisor<float> division(divisor);
  const std::size_t value_count = element_count * dtype_values(dtype);
  alignas(64) float values[kRoundedValues];
  for (std::size_t first = 0; first < value_count; first += kRoundedValues) {
    const std::size_t n = std::min(kRoundedValues, value_count - first);
    std::memcpy(values, sum + first * sizeof(float), n * sizeof(float));
    run_with(
        isa, [&division, n, block = values ](auto) __attribute__((always_inline)) { divide(block, n, division); });
    encode(dtype, values, out + array_bytes(dtype, first), n, isa);
  }
}

/// `sum` for types without a kernel of their own: part by part.
void sum_in_parts(Isa isa, std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count,
                  DType dtype, unsigned divisor) {
  const std::size_t most = kRoundedValues / dtype_values(dtype);
  alignas(64) float values[kRoundedValues];
  auto* const running = reinterpret_cast<std::byte*>(values);
  for (std::size_t first = 0; first < element_count; first += most) {
    const std::size_t n = std::min(most, element_count - first);
    const std::size_t offset_bytes = first * dtype_bytes(dtype);
    start_sum(inputs[0] + offset_bytes, running, n, dtype, isa);
    for (const std::byte* input : inputs.subspan(1)) accumulate(input + offset_bytes, running, n, dtype, isa);
    finish_sum(running, out + offset_bytes, n, dtype, divisor, isa);
  }
}

}  // namespace

void sum(std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
         unsigned divisor, Isa isa) {
  invariant(!inputs.empty() && divisor > 0, "a sum has inputs and a divisor");
  if (is_half(dtype)) return sum_half(isa, inputs, out, element_count, dtype, divisor);
  if (dtype == DType::int8_blocks) return sum_in_parts(isa, inputs, out, element_count, dtype, divisor);
  with_element_type(dtype, [&](auto type) { sum_wide<decltype(type)>(isa, inputs, out, element_count, divisor); });
}

void start_sum(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype, Isa isa) {
  if (sums_in_float32(dtype))
    return decode(dtype, input, reinterpret_cast<float*>(sum), element_count * dtype_values(dtype), isa);
  copy_bytes(input, sum, element_count * dtype_bytes(dtype));
}

void accumulate(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype, Isa isa) {
  if (is_half(dtype)) return accumulate_half(isa, input, reinterpret_cast<float*>(sum), element_count, dtype);
  if (dtype == DType::int8_blocks)
    return accumulate_int8(isa, input, reinterpret_cast<float*>(sum), element_count * dtype_values(dtype));
  with_element_type(dtype, [&](auto type) { accumulate_wide<decltype(type)>(isa, input, sum, element_count); });
}

void finish_sum(const std::byte* sum, std::byte* out, std::size_t element_count, DType dtype, unsigned divisor,
                Isa isa) {
  invariant(divisor > 0, "a sum has a divisor");
  if (sums_in_float32(dtype)) return divide_and_round(isa, sum, out, element_count, dtype, divisor);
  with_element_type(dtype, [&](auto type) { divide_wide<decltype(type)>(isa, sum, out, element_count, divisor); });
}

}  // namespace poseidon::kernel
