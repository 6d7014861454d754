#include <algorithm>
#include <limits>
#include <vector>

#include "base/invariant.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

constexpr std::uint64_t kNoRow = std::numeric_limits<std::uint64_t>::max();

/// The next row of a term.
struct Cursor {
  const RowTerm* term;
  std::size_t at = 0;

  std::uint64_t index() const {
    if (at == term->count) return kNoRow;
    return term->indexes == nullptr ? at : term->indexes[at];
  }
};

std::uint64_t next_row(std::span<const Cursor> cursors) {
  std::uint64_t next = kNoRow;
  for (const Cursor& cursor : cursors) next = std::min(next, cursor.index());
  return next;
}

}  // namespace

std::size_t sum_rows(std::span<const RowTerm> terms, DType dtype, DType out_dtype, std::size_t cols, unsigned divisor,
                     std::uint32_t* indexes, std::byte* values) {
  invariant(divisor > 0 && (out_dtype == dtype || (sums_in_float32(dtype) && out_dtype == DType::float32)),
            "a sum of rows has a divisor, and their type or float32");
  const std::size_t row_bytes = cols * dtype_bytes(dtype);
  const std::size_t out_bytes = cols * dtype_bytes(out_dtype);
  const DType sum_dtype = sums_in_float32(dtype) && out_dtype != dtype ? DType::float32 : dtype;
  std::vector<std::byte> running(cols * running_sum_bytes(dtype));
  std::vector<Cursor> cursors;
  for (const RowTerm& term : terms) cursors.push_back({&term});
  std::size_t count = 0;
  for (std::uint64_t row = next_row(cursors); row != kNoRow; row = next_row(cursors), ++count) {
    bool first = true;
    for (Cursor& cursor : cursors) {
      if (cursor.index() != row) continue;
      const std::byte* const input = cursor.term->values + cursor.at * row_bytes;
      (first ? start_sum : accumulate)(input, running.data(), cols, dtype, best_isa());
      first = false;
      ++cursor.at;
    }
    if (indexes != nullptr) indexes[count] = static_cast<std::uint32_t>(row);
    finish_sum(running.data(), values + (indexes == nullptr ? row : count) * out_bytes, cols, sum_dtype, divisor);
  }
  return count;
}

}  // namespace poseidon::kernel
