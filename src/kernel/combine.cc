#include "kernel/combine.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "base/invariant.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

constexpr std::size_t kBlockElements = 1024;  // they stay in the L1 cache

/// The type of gradients whose sums have the same bits, if there is one.
std::optional<DType> summed_as(Element element) {
  if (element == Element::int8) return DType::uint8;
  return dtype_of(element);
}

/// Whole numbers are combined in 64 bits, where they wrap around and no step overflows.
template <typename T>
POSEIDON_INLINE T combined(ReduceOp op, T a, T b) {
  if (op == ReduceOp::min) return a < b || a != a ? a : b;
  if (op == ReduceOp::max) return a > b || a != a ? a : b;
  if constexpr (std::is_integral_v<T>) {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    if (op == ReduceOp::band) return static_cast<T>(x & y);
    if (op == ReduceOp::bor) return static_cast<T>(x | y);
    if (op == ReduceOp::bxor) return static_cast<T>(x ^ y);
    return static_cast<T>(op == ReduceOp::sum ? x + y : x * y);
  } else {
    return op == ReduceOp::sum ? a + b : a * b;
  }
}

/// Adds an input to the block. `op` is known when this is compiled, so that the loop has no choice in it.
template <ReduceOp op, typename T>
POSEIDON_INLINE void combine_into(T* running, const T* input, std::size_t n) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) running[i] = combined(op, running[i], input[i]);
}

template <ReduceOp op, typename T>
void combine_as(Isa isa, std::span<const std::byte* const> inputs, std::byte* out_bytes, std::size_t element_count) {
  T* const out = reinterpret_cast<T*>(out_bytes);
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        alignas(64) T running[kBlockElements];
        for (std::size_t first = 0; first < element_count; first += kBlockElements) {
          const std::size_t n = std::min(kBlockElements, element_count - first);
          std::memcpy(running, reinterpret_cast<const T*>(inputs[0]) + first, n * sizeof(T));
          for (std::size_t i = 1; i < inputs.size(); ++i)
            combine_into<op>(running, reinterpret_cast<const T*>(inputs[i]) + first, n);
          std::memcpy(out + first, running, n * sizeof(T));
        }
      });
}

/// The same for float16 and bfloat16.
template <ReduceOp op>
void combine_half(Isa isa, DType dtype, std::span<const std::byte* const> inputs, std::byte* out,
                  std::size_t element_count) {
  alignas(64) float running[kBlockElements];
  alignas(64) float input[kBlockElements];
  for (std::size_t first = 0; first < element_count; first += kBlockElements) {
    const std::size_t n = std::min(kBlockElements, element_count - first);
    const std::size_t offset_bytes = first * dtype_bytes(dtype);
    decode(dtype, inputs[0] + offset_bytes, running, n, isa);
    for (const std::byte* one : inputs.subspan(1)) {
      decode(dtype, one + offset_bytes, input, n, isa);
      run_with(
          isa, [&](auto) __attribute__((always_inline)) { combine_into<op>(running, input, n); });
    }
    encode(dtype, running, out + offset_bytes, n, isa);
  }
}

template <ReduceOp op>
void combine_with(Isa isa, Element element, std::span<const std::byte* const> inputs, std::byte* out,
                  std::size_t element_count) {
  switch (element) {
    case Element::float32:
      return combine_as<op, float>(isa, inputs, out, element_count);
    case Element::float64:
      return combine_as<op, double>(isa, inputs, out, element_count);
    case Element::float16:
      return combine_half<op>(isa, DType::float16, inputs, out, element_count);
    case Element::bfloat16:
      return combine_half<op>(isa, DType::bfloat16, inputs, out, element_count);
    case Element::int8:
      return combine_as<op, std::int8_t>(isa, inputs, out, element_count);
    case Element::uint8:
      return combine_as<op, std::uint8_t>(isa, inputs, out, element_count);
    case Element::int16:
      return combine_as<op, std::int16_t>(isa, inputs, out, element_count);
    case Element::int32:
      return combine_as<op, std::int32_t>(isa, inputs, out, element_count);
    case Element::int64:
      return combine_as<op, std::int64_t>(isa, inputs, out, element_count);
  }
}

}  // namespace

void combine(ReduceOp op, Element element, std::span<const std::byte* const> inputs, std::byte* out,
             std::size_t element_count, unsigned divisor, Isa isa) {
  invariant(!inputs.empty() && divisor > 0, "a reduction has inputs and a divisor");
  switch (op) {
    case ReduceOp::sum:
      if (const auto dtype = summed_as(element)) return sum(inputs, out, element_count, *dtype, divisor, isa);
      return combine_with<ReduceOp::sum>(isa, element, inputs, out, element_count);
    case ReduceOp::product:
      return combine_with<ReduceOp::product>(isa, element, inputs, out, element_count);
    case ReduceOp::min:
      return combine_with<ReduceOp::min>(isa, element, inputs, out, element_count);
    case ReduceOp::max:
      return combine_with<ReduceOp::max>(isa, element, inputs, out, element_count);
    case ReduceOp::band:
      return combine_with<ReduceOp::band>(isa, element, inputs, out, element_count);
    case ReduceOp::bor:
      return combine_with<ReduceOp::bor>(isa, element, inputs, out, element_count);
    case ReduceOp::bxor:
      return combine_with<ReduceOp::bxor>(isa, element, inputs, out, element_count);
  }
}

}  // namespace poseidon::kernel
