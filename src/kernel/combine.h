// The reductions of collectives: sums, products, extremes and bit operations on more types than gradients have.
#pragma once

#include <cstddef>
#include <span>

#include "kernel/dispatch.h"
#include "poseidon/collective.h"

namespace poseidon::kernel {

/// out[i] = in[0][i] ∘ in[1][i] ∘ …, in the given order. All arrays have `element_count` elements. `inputs` is not
/// empty, and `out` may be one of the inputs. Sums are those of `sum`, divided by `divisor`, which counts for nothing
/// else. 16-bit floating-point numbers are combined in float32 and rounded once at the end. Integers wrap around. An
/// extreme of a NaN is a NaN. `op` must be defined for the type (check_reduction).
void combine(ReduceOp op, Element element, std::span<const std::byte* const> inputs, std::byte* out,
             std::size_t element_count, unsigned divisor, Isa isa = best_isa());

}  // namespace poseidon::kernel
