// Low-rank compression: products of a matrix with a few vectors, and their orthogonalization.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/invariant.h"
#include "kernel/compression.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {
namespace {

// Sums are made in lanes, so that their bits do not depend on the width of vectors.
constexpr std::size_t kLanes = 16;
// Of a vector that keeps a smaller part of its length, only rounding is left.
constexpr double kLeastPart = 1e-6;

template <typename T>
POSEIDON_INLINE T sum_of(const std::array<T, kLanes>& lanes) {
  T sum = 0;
  for (const T lane : lanes) sum += lane;
  return sum;
}

/// Σ (gradient + residual)·vector.
POSEIDON_INLINE float dot(const float* gradient, const float* residual, const float* vector, std::size_t count) {
  std::array<float, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] += (gradient[i + lane] + residual[i + lane]) * vector[i + lane];
  for (; i < count; ++i) lanes[i % kLanes] += (gradient[i] + residual[i]) * vector[i];
  return sum_of(lanes);
}

double wide_dot(const float* a, const float* b, std::size_t count) {
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += double{a[i + lane]} * double{b[i + lane]};
  for (; i < count; ++i) lanes[i % kLanes] += double{a[i]} * double{b[i]};
  return sum_of(lanes);
}

void scale(float* vector, std::size_t length, double factor) {
  for (std::size_t i = 0; i < length; ++i) vector[i] = static_cast<float>(vector[i] * factor);
}

/// Pseudo-random numbers between −1 and 1, by place (SplitMix64).
float number_at(std::uint64_t place) {
  std::uint64_t z = (place + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1);
}

}  // namespace

void multiply_right(const LowRank& shape, const float* gradient, const float* residual, const float* right,
                    std::size_t begin, std::size_t end, float* left) {
  invariant(begin <= end && end <= shape.rows, "rows lie within the matrix");
  run_with(
      best_isa(), [=](auto) __attribute__((always_inline)) {
        for (std::size_t row = begin; row < end; ++row)
          for (std::size_t k = 0; k < shape.rank; ++k)
            left[k * shape.rows + row] =
                dot(gradient + row * shape.cols, residual + row * shape.cols, right + k * shape.cols, shape.cols);
      });
}

void multiply_left(const LowRank& shape, const float* gradient, const float* residual, const float* left,
                   std::size_t begin, std::size_t end, float* right) {
  invariant(begin <= end && end <= shape.cols, "columns lie within the matrix");
  run_with(
      best_isa(), [=](auto) __attribute__((always_inline)) {
        for (std::size_t k = 0; k < shape.rank; ++k)
          std::fill(right + k * shape.cols + begin, right + k * shape.cols + end, 0.0F);
        for (std::size_t row = 0; row < shape.rows; ++row) {
          const float* const g = gradient + row * shape.cols;
          const float* const r = residual + row * shape.cols;
          for (std::size_t k = 0; k < shape.rank; ++k) {
            const float factor = left[k * shape.rows + row];
            float* const out = right + k * shape.cols;
            POSEIDON_INDEPENDENT_ELEMENTS
            for (std::size_t col = begin; col < end; ++col) out[col] += (g[col] + r[col]) * factor;
          }
        }
      });
}

bool orthonormalize(std::size_t count, std::size_t length, float* vectors) {
  for (std::size_t k = 0; k < count; ++k) {
    float* const vector = vectors + k * length;
    const double before = wide_dot(vector, vector, length);
    if (!std::isfinite(before)) return false;
    // Twice is enough: the second pass removes what rounding has left.
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t other = 0; other < k; ++other) {
        const float* const base = vectors + other * length;
        const double part = wide_dot(vector, base, length);
        for (std::size_t i = 0; i < length; ++i) vector[i] = static_cast<float>(vector[i] - part * base[i]);
      }
    }
    const double after = wide_dot(vector, vector, length);
    const bool depends = after <= kLeastPart * kLeastPart * before;
    scale(vector, length, depends ? 0 : 1 / std::sqrt(after));
  }
  return true;
}

void refresh(std::size_t count, std::size_t length, float* vectors) {
  for (std::size_t k = 0; k < count; ++k) {
    float* const vector = vectors + k * length;
    double size = wide_dot(vector, vector, length);
    if (!(size > 0)) {
      for (std::size_t i = 0; i < length; ++i) vector[i] = number_at(k * length + i);
      size = wide_dot(vector, vector, length);
    }
    scale(vector, length, 1 / std::sqrt(size));
  }
}

void subtract_low_rank(const LowRank& shape, const float* gradient, float* residual, const float* left,
                       const float* own, const float* total, std::size_t begin, std::size_t end, unsigned divisor,
                       float* out) {
  invariant(begin <= end && end <= shape.rows, "rows lie within the matrix");
  std::vector<float> sent(shape.cols);
  std::vector<float> sum(shape.cols);
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t first = row * shape.cols;
    run_with(
        best_isa(), [ =, &shape, sent = sent.data(), sum = sum.data() ](auto) __attribute__((always_inline)) {
          std::fill(sent, sent + shape.cols, 0.0F);
          std::fill(sum, sum + shape.cols, 0.0F);
          for (std::size_t k = 0; k < shape.rank; ++k) {
            const float factor = left[k * shape.rows + row];
            const float* const mine = own + k * shape.cols;
            const float* const all = total + k * shape.cols;
            for (std::size_t col = 0; col < shape.cols; ++col) {
              sent[col] += factor * mine[col];
              sum[col] += factor * all[col];
            }
          }
          if (gradient == nullptr) return;
          float* const kept = residual + first;
          for (std::size_t col = 0; col < shape.cols; ++col)
            kept[col] = (gradient[first + col] + kept[col]) - sent[col];
        });
    finish_sum(reinterpret_cast<const std::byte*>(sum.data()), reinterpret_cast<std::byte*>(out + first), shape.cols,
               DType::float32, divisor);
  }
}

}  // namespace poseidon::kernel
