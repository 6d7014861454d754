// Lossy compression of gradients with error feedback: a worker adds what it has not sent, the *residual*, to its next
// gradient. Pure arithmetic on float32, as in kernel.h; the bits do not depend on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/kernel.h"

namespace poseidon::kernel {

/// Takes the indexes.size() elements of gradient + residual of the largest magnitude, at most `element_count`. NaN is
/// larger than infinity. Of equal magnitudes the lowest indexes are taken. `indexes` gets the places, in ascending
/// order, and `values` the elements. The residual becomes gradient + residual, with zeros for what is taken. If an
/// element of gradient + residual is not finite, the residual stays as it is (source: Lin et al. 2018, "Deep Gradient
/// Compression").
void take_largest(const float* gradient, float* residual, std::size_t element_count, std::span<std::uint32_t> indexes,
                  float* values);

/// Elements [begin, end) of out: zeros, to which each term adds its elements, term after term, divided by `divisor` as
/// in `sum`. A term is rows of one float32. Disjoint ranges may run on different threads.
void sum_sparse(std::span<const RowTerm> terms, std::size_t begin, std::size_t end, unsigned divisor, float* out);

}  // namespace poseidon::kernel
