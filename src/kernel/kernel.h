// Arithmetic on gradients. These are pure functions: no threads, no allocation that outlives a call, no errors.
//
// Every replica must compute the same bits, whatever CPU it has. So each result element is one chain of IEEE operations
// in a fixed order. The vector width never changes the order, and the compiler may not contract a·b + c by itself
// (-ffp-contract=off). Where a fused multiply-add is used, every path asks for it by name.
//
// `isa` is the instruction set with which a kernel runs, which this CPU must have. Tests compare them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {

/// out[i] = (in[0][i] + in[1][i] + …) / divisor, added in the given order. All arrays have `element_count` elements of
/// `dtype`. `inputs` is not empty, and `out` may be one of the inputs. 16-bit types and int8_blocks are added in
/// float32 and rounded once at the end. If divisor is a power of two, the division is a multiplication by 1/divisor,
/// which is exact. Integers wrap around and ignore `divisor`; callers ensure that it is 1.
void sum(std::span<const std::byte* const> inputs, std::byte* out, std::size_t element_count, DType dtype,
         unsigned divisor, Isa isa = best_isa());

/// out = in, for an `out` that nobody reads soon: where the CPU can, it is written to memory without being read into
/// the caches first. The arrays do not overlap.
void copy_past_caches(std::span<const std::byte> in, std::byte* out);

/// Whether sums of `dtype` are made in float32 and rounded at the end.
constexpr bool sums_in_float32(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::int8_blocks;
}

/// Bytes of one element of a running sum of `dtype`: a float32 for each value of types that are summed in float32, and
/// the size of the element otherwise.
constexpr std::size_t running_sum_bytes(DType dtype) {
  return sums_in_float32(dtype) ? sizeof(float) * dtype_values(dtype) : dtype_bytes(dtype);
}

/// Float32 values may travel as another type: float16, bfloat16 or int8_blocks.
///
/// out = in as `dtype`, each value rounded once, to nearest with ties to even. `out` has array_bytes(dtype,
/// value_count) bytes. It may begin where `in` begins. Infinite values and NaN stay visible: 16-bit types keep them,
/// and a block of int8_blocks that has one becomes NaN. Values too large for float16 become infinite.
void encode(DType dtype, const float* in, std::byte* out, std::size_t value_count, Isa isa = best_isa());

/// The same with error feedback: encodes in + residual, and keeps what the rounding has lost in `residual`. Where the
/// loss is not finite it keeps 0. The arrays do not overlap, but `out` may begin where `in` begins.
void encode_with_feedback(DType dtype, const float* in, float* residual, std::byte* out, std::size_t value_count,
                          Isa isa = best_isa());

/// out = in. This is exact for 16-bit types. `in` may be the last bytes of `out`.
void decode(DType dtype, const std::byte* in, float* out, std::size_t value_count, Isa isa = best_isa());

/// A sum of inputs that arrive one after the other: call start_sum with the first, accumulate with each further one,
/// and then finish_sum. The result has the bits of `sum` over the same inputs in that order (except the payload of a
/// NaN). `sum` has element_count × running_sum_bytes(dtype) bytes. Calls on slices of the arrays give the same bits, so
/// an input may be added in the pieces in which it arrives.
///
/// sum[i] = input[i]. The arrays do not overlap.
void start_sum(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype, Isa isa = best_isa());

/// sum[i] += input[i]. Integers wrap around. The arrays do not overlap.
void accumulate(const std::byte* input, std::byte* sum, std::size_t element_count, DType dtype, Isa isa = best_isa());

/// out[i] = sum[i] / divisor, rounded once to `dtype`. The division is that of `sum`. `out` may be `sum`.
void finish_sum(const std::byte* sum, std::byte* out, std::size_t element_count, DType dtype, unsigned divisor,
                Isa isa = best_isa());

/// One term of a factor product: factors, or a dense matrix.
struct FactorTerm {
  DType dtype = DType::float32;      // a floating-point type; for left and right no wider than the result's
  const std::byte* left = nullptr;   // count × rows, row-major: output gradients
  const std::byte* right = nullptr;  // count × cols, row-major: inputs
  std::size_t count = 0;             // K of this piece
  const std::byte* dense = nullptr;  // rows × cols; if it is not null, there are no factors
};

/// Computes rows [row_begin, row_end) of out = (Σ leftᵀ·right or dense, term after term) / divisor, an M×N matrix
/// (rows × cols, row-major) of `dtype`. With `accumulate` the result is added to what `out` holds. Each element is one
/// chain of fused multiply-adds over k in the order of the terms, in float32 (float64 for float64), rounded once to
/// `dtype` (source: Poseidon §3.2). Rows are independent, so disjoint row ranges may run on different threads.
void factor_product(std::span<const FactorTerm> terms, std::byte* out, DType dtype, std::size_t rows, std::size_t cols,
                    std::size_t row_begin, std::size_t row_end, unsigned divisor, bool accumulate,
                    Isa isa = best_isa());

/// Rows of a matrix, row after row: `count` rows of ascending `indexes`. Without indexes they are the rows from 0 on.
struct RowTerm {
  const std::uint32_t* indexes = nullptr;
  const std::byte* values = nullptr;
  std::size_t count = 0;
};

/// Adds the rows of equal index, term after term, and divides each sum by `divisor`. The bits are those of `sum` over
/// the terms that have the row. A row has `cols` elements of `dtype`. Float16 and bfloat16 are added in float32 and
/// rounded once to `out_dtype`, which is `dtype` or float32. Other types are not converted.
///
/// The rows that some term has are written to `values` one after the other, in ascending order, and their indexes to
/// `indexes`. If `indexes` is null, row i is written at the place of row i of the matrix, and other rows are not
/// touched. Returns the number of rows. The values of the terms need not be aligned to more than an element.
std::size_t sum_rows(std::span<const RowTerm> terms, DType dtype, DType out_dtype, std::size_t cols, unsigned divisor,
                     std::uint32_t* indexes, std::byte* values);

}  // namespace poseidon::kernel
