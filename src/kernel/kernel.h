// Arithmetic on gradients. Pure: no threads, no allocation that outlives a call, no errors.
//
// Every replica must compute the same bits whatever CPU it has, so each result element is one
// chain of IEEE operations in a fixed order: the vector width never changes the order, and the
// compiler may not contract a·b + c on its own (-ffp-contract=off; where a fused multiply-add is
// used it is asked for by name on every path).
#pragma once

#include <cstddef>
#include <span>

#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// out[i] = (in[0][i] + in[1][i] + …) / divisor, added in the given order. All arrays have
/// `element_count` elements of `dtype`; `inputs` is not empty; `out` may be one of the inputs.
/// 16-bit types are added in float32 and rounded once at the end. The division is one multiplication
/// by 1/divisor when divisor is a power of two (exact), a division otherwise. Integers wrap and
/// ignore `divisor` (callers ensure 1).
void sum(std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
         unsigned divisor);

/// Bytes of one element of a running sum of `dtype` values: 4 for the 16-bit types, which are added in
/// float32, the value's own otherwise.
constexpr std::size_t running_sum_bytes(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 ? sizeof(float) : dtype_bytes(dtype);
}

/// A sum of inputs that come one after the other: start_sum with the first, accumulate with each
/// further one, finish_sum. The result has the bits of `sum` over the same inputs in that order (the
/// payload of a NaN excepted). `sum` has element_count × running_sum_bytes(dtype) bytes. Calls on
/// slices of the arrays give the same bits, so an input may be added in the pieces it arrives in.
///
/// sum[i] = input[i]. The arrays do not overlap.
void start_sum(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype);

/// sum[i] += input[i]; integers wrap. The arrays do not overlap.
void accumulate(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype);

/// out[i] = sum[i] / divisor, rounded once to `dtype`; the division is that of `sum`. `out` may be `sum`.
void finish_sum(const std::byte* sum, std::byte* out, std::size_t element_count, DType dtype, unsigned divisor);

/// One piece of a factor product, in the order of the sum.
struct FactorTerm {
  DType dtype = DType::float32;      // a floating type; of left and right one no wider than the result's
  const std::byte* left = nullptr;   // count × rows, row-major: output gradients
  const std::byte* right = nullptr;  // count × cols, row-major: inputs
  std::size_t count = 0;             // K of this piece
  const std::byte* dense = nullptr;  // or instead: rows × cols
};

/// Rows [row_begin, row_end) of out = (Σ leftᵀ·right or dense, term after term) / divisor, an
/// M×N matrix (rows × cols, row-major) of `dtype`; with `accumulate` that is added to what `out`
/// holds. Each element is one fused-multiply-add chain over k in the order of the terms, in
/// float32 (float64 for float64), rounded once to `dtype` (source: Poseidon §3.2).
/// Rows are independent, so disjoint row ranges may run on different threads.
void factor_product(std::span<const FactorTerm> terms, std::byte* out, DType dtype, std::size_t rows, std::size_t cols,
                    std::size_t row_begin, std::size_t row_end, unsigned divisor, bool accumulate);

}  // namespace poseidon::kernel
