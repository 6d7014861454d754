// A blocked matrix product as in GotoBLAS. Panels of the factors are packed, so that the innermost loop reads them in
// order from the caches. A small tile of the result stays in registers. k is innermost, and its blocks come in the
// order of the terms. So each element is one chain of fused multiply-adds, whatever the sizes of the blocks, the tile
// and the vectors are.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/buffer.h"
#include "base/invariant.h"
#include "kernel/dispatch.h"
#include "kernel/half.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

// A tile is as large as the registers of the instruction set allow.
template <Isa isa>
struct Tile;
template <>
struct Tile<Isa::baseline> {
  static constexpr std::size_t kRows = 4, kColBytes = 16;
};
template <>
struct Tile<Isa::neon> {
  static constexpr std::size_t kRows = 8, kColBytes = 48;
};
template <>
struct Tile<Isa::v3> {
  static constexpr std::size_t kRows = 4, kColBytes = 96;
};
template <>
struct Tile<Isa::v4> {
  static constexpr std::size_t kRows = 8, kColBytes = 192;
};

// A block of the result and its panels fit the L2 cache together (under 0.5 MB). A block is a multiple of the tiles of
// every instruction set.
constexpr std::size_t kBlockRows = 128;
constexpr std::size_t kBlockColBytes = 1536;
constexpr std::size_t kBlockDepth = 128;

template <typename T>
constexpr std::size_t kBlockCols = kBlockColBytes / sizeof(T);

POSEIDON_INLINE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
POSEIDON_INLINE double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

/// Continues the chains of tile[r][c] over k. `left` is depth × tile_rows, and `right` is depth × tile_cols.
template <typename T, std::size_t tile_rows, std::size_t tile_cols>
POSEIDON_INLINE void multiply_tile(const T* left, const T* right, std::size_t depth, T* block, std::size_t stride) {
  T tile[tile_rows][tile_cols];
  for (std::size_t r = 0; r < tile_rows; ++r) {
    for (std::size_t c = 0; c < tile_cols; ++c) tile[r][c] = block[r * stride + c];
  }
  for (std::size_t k = 0; k < depth; ++k) {
    // The loop is unrolled, so that the compiler keeps the tile in registers.
#pragma GCC unroll 16
    for (std::size_t r = 0; r < tile_rows; ++r) {
      for (std::size_t c = 0; c < tile_cols; ++c) {
        tile[r][c] = fused_multiply_add(left[k * tile_rows + r], right[k * tile_cols + c], tile[r][c]);
      }
    }
  }
  for (std::size_t r = 0; r < tile_rows; ++r) {
    for (std::size_t c = 0; c < tile_cols; ++c) block[r * stride + c] = tile[r][c];
  }
}

/// Copies elements [first, first + n) of an array of `dtype` and converts them to T. Factors need not be aligned.
template <typename T>
void load(Isa isa, DType dtype, const std::byte* array, std::size_t first, std::size_t n, T* out) {
  const std::byte* in = array + first * dtype_bytes(dtype);
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::float32) {
      std::memcpy(out, in, n * sizeof(float));
    } else {
      widen(isa, dtype, in, out, n);
    }
  } else {
    if (dtype == DType::float64) {
      std::memcpy(out, in, n * sizeof(double));
      return;
    }
    float narrow_values[kBlockCols<double>];  // every caller's n is at most the columns of a block
    load<float>(isa, dtype, in, 0, n, narrow_values);
    std::copy_n(narrow_values, n, out);
  }
}

/// The part of the result that is computed at one time.
struct Block {
  std::size_t row, row_count, col, col_count;
};

/// Packs columns [first, first + n) of `depth` rows of a k-major factor, from row `k` on. They go to panels of
/// `panel_cols` columns, from row `packed` on. The last panel is padded with zeros.
template <std::size_t panel_cols, typename T>
void pack(Isa isa, DType dtype, const std::byte* factor, std::size_t factor_cols, std::size_t k, std::size_t depth,
          std::size_t first, std::size_t n, std::size_t packed, T* panels) {
  alignas(64) T row[kBlockCols<float>] = {};
  for (std::size_t i = 0; i < depth; ++i) {
    load(isa, dtype, factor, (k + i) * factor_cols + first, n, row);
    T* out = panels + (packed + i) * panel_cols;
    for (std::size_t c = 0; c < n; c += panel_cols) std::memcpy(out + c * kBlockDepth, row + c, panel_cols * sizeof(T));
  }
}

/// The constants of one call and its scratch memory.
template <typename T>
struct Product {
  std::span<const FactorTerm> terms;
  std::byte* out = nullptr;
  DType dtype = DType::float32;
  std::size_t rows = 0, cols = 0;
  unsigned divisor = 1;
  bool accumulate = false;
  T* left = nullptr;  // packed panels with kBlockDepth rows each
  T* right = nullptr;
  T* chains = nullptr;  // the block's sums so far; rows are kBlockCols<T> apart
};

/// Continues the block's chains over the `depth` rows that are packed.
template <typename T, Isa isa>
POSEIDON_INLINE void multiply_packed(const Product<T>& product, const Block& block, std::size_t depth) {
  constexpr std::size_t tile_rows = Tile<isa>::kRows;
  constexpr std::size_t tile_cols = Tile<isa>::kColBytes / sizeof(T);
  static_assert(kBlockRows % tile_rows == 0 && kBlockCols<T> % tile_cols == 0);
  const std::size_t element_bytes = dtype_bytes(product.dtype);
  for (std::size_t c = 0; c < block.col_count; c += tile_cols) {
    const std::size_t line_bytes = std::min(tile_cols, block.col_count - c) * element_bytes;
    for (std::size_t r = 0; r < block.row_count; r += tile_rows) {
      // Prefetch the result's lines while the tile is computed, because store() would wait for them.
      for (std::size_t i = r; i < std::min(r + tile_rows, block.row_count); ++i) {
        const std::byte* line = product.out + ((block.row + i) * product.cols + block.col + c) * element_bytes;
        for (std::size_t b = 0; b < line_bytes; b += 64) __builtin_prefetch(line + b, 1);
      }
      multiply_tile<T, tile_rows, tile_cols>(product.left + r * kBlockDepth, product.right + c * kBlockDepth, depth,
                                             product.chains + r * kBlockCols<T> + c, kBlockCols<T>);
    }
  }
}

/// Adds consecutive factor terms. Short terms share a packed panel, so that a tile is loaded and stored once for all of
/// them.
template <typename T, Isa isa>
POSEIDON_INLINE void add_factors(const Product<T>& product, std::span<const FactorTerm> terms, const Block& block) {
  constexpr std::size_t tile_rows = Tile<isa>::kRows;
  constexpr std::size_t tile_cols = Tile<isa>::kColBytes / sizeof(T);
  std::size_t packed = 0;
  for (const FactorTerm& term : terms) {
    for (std::size_t k = 0; k < term.count;) {
      const std::size_t depth = std::min(kBlockDepth - packed, term.count - k);
      pack<tile_rows>(isa, term.dtype, term.left, product.rows, k, depth, block.row, block.row_count, packed,
                      product.left);
      pack<tile_cols>(isa, term.dtype, term.right, product.cols, k, depth, block.col, block.col_count, packed,
                      product.right);
      k += depth;
      packed += depth;
      if (packed < kBlockDepth) continue;
      multiply_packed<T, isa>(product, block, packed);
      packed = 0;
    }
  }
  if (packed > 0) multiply_packed<T, isa>(product, block, packed);
}

template <typename T>
void add_dense(Isa isa, const Product<T>& product, const FactorTerm& term, const Block& block) {
  T values[kBlockCols<T>];
  for (std::size_t r = 0; r < block.row_count; ++r) {
    load(isa, term.dtype, term.dense, (block.row + r) * product.cols + block.col, block.col_count, values);
    T* chain = product.chains + r * kBlockCols<T>;
    for (std::size_t c = 0; c < block.col_count; ++c) chain[c] += values[c];
  }
}

template <typename T>
void store(Isa isa, const Product<T>& product, const Block& block) {
  const bool multiply = std::has_single_bit(product.divisor);
  const T denominator = static_cast<T>(product.divisor);
  const T reciprocal = T{1} / denominator;
  const std::size_t n = block.col_count;
  T held[kBlockCols<T>];
  for (std::size_t r = 0; r < block.row_count; ++r) {
    T* values = product.chains + r * kBlockCols<T>;
    const std::size_t first = (block.row + r) * product.cols + block.col;
    for (std::size_t c = 0; c < n; ++c) values[c] = multiply ? values[c] * reciprocal : values[c] / denominator;
    if (product.accumulate) {
      load(isa, product.dtype, product.out, first, n, held);
      for (std::size_t c = 0; c < n; ++c) values[c] = held[c] + values[c];
    }
    std::byte* out = product.out + first * dtype_bytes(product.dtype);
    if (dtype_bytes(product.dtype) == sizeof(T)) {
      std::memcpy(out, values, n * sizeof(T));
    } else if constexpr (std::is_same_v<T, float>) {
      narrow(isa, product.dtype, values, out, n);
    }
  }
}

template <typename T>
void add_terms(Isa isa, const Product<T>& product, const Block& block) {
  const std::span<const FactorTerm> terms = product.terms;
  for (std::size_t i = 0; i < terms.size();) {
    std::size_t end = i;
    while (end < terms.size() && terms[end].dense == nullptr) ++end;
    if (end > i) {
      run_with(
          isa, [&product, &block, run = terms.subspan(i, end - i) ](auto tag)
                   __attribute__((always_inline)) { add_factors<T, decltype(tag)::value>(product, run, block); });
    }
    if (end < terms.size()) add_dense(isa, product, terms[end], block);
    i = end + 1;
  }
}

template <typename T>
void multiply(Isa isa, Product<T> product, std::size_t row_begin, std::size_t row_end) {
  constexpr std::size_t left_count = kBlockRows * kBlockDepth;
  constexpr std::size_t right_count = kBlockCols<T> * kBlockDepth;
  constexpr std::size_t block_count = kBlockRows * kBlockCols<T>;
  Buffer scratch((left_count + right_count + block_count) * sizeof(T));
  product.left = reinterpret_cast<T*>(scratch.data());
  product.right = product.left + left_count;
  product.chains = product.right + right_count;
  for (std::size_t row = row_begin; row < row_end; row += kBlockRows) {
    for (std::size_t col = 0; col < product.cols; col += kBlockCols<T>) {
      const Block block{row, std::min(kBlockRows, row_end - row), col, std::min(kBlockCols<T>, product.cols - col)};
      std::fill_n(product.chains, block_count, T{0});
      add_terms(isa, product, block);
      store(isa, product, block);
    }
  }
}

}  // namespace

void factor_product(std::span<const FactorTerm> terms, std::byte* out, DType dtype, std::size_t rows, std::size_t cols,
                    std::size_t row_begin, std::size_t row_end, unsigned divisor, bool accumulate, Isa isa) {
  invariant(row_begin <= row_end && row_end <= rows && divisor > 0 && dtype_is_floating(dtype),
            "rows of a product lie within it, and are of a floating-point type");
  if (dtype == DType::float64) {
    multiply<double>(isa, {terms, out, dtype, rows, cols, divisor, accumulate}, row_begin, row_end);
  } else {
    multiply<float>(isa, {terms, out, dtype, rows, cols, divisor, accumulate}, row_begin, row_end);
  }
}

}  // namespace poseidon::kernel
