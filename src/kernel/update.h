// Optimizer updates on the server (Parameter Hub §3.2.2). Pure, like kernel.h.
//
// SGD, Adam and AdamW have the bits of PyTorch's torch.optim on CPU tensors with its default settings
// (foreach and fused unset, amsgrad off): the same operations in the same order, multiply-adds fused
// where PyTorch's AVX2 and AVX-512 kernels fuse them, scalars computed in double and rounded to the
// parameters' type, the square root of square_root.h. An element's result depends on its own values
// alone: neither on its place, nor on how a tensor is cut into slices, nor on the vector width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/dispatch.h"
#include "poseidon/dtype.h"
#include "poseidon/update.h"

namespace poseidon::kernel {

/// One update of a slice in place, for sgd, adam and adamw. `step` counts from 1; in SGD's first step
/// the momentum buffer becomes the gradient. `states` are update_state_count(rule) arrays, changed in
/// place: the momentum buffer, or exp_avg and exp_avg_sq. All arrays have `element_count` elements of
/// `dtype`, float32 or float64, and none overlap. One pass over memory.
void update(const UpdateRule& rule, std::uint64_t step, std::byte* parameters, const std::byte* gradient,
            std::span<std::byte* const> states, std::size_t element_count, DType dtype);

/// Sums of squares over a layer, in double. Those of its slices add up; in the same order, to the same bits.
struct LambNorms {
  double parameter_squares = 0;
  double direction_squares = 0;
};

/// LAMB's first half (You et al. 2020, Algorithm 2): exp_avg and exp_avg_sq take in the gradient as in
/// Adam, direction[i] = m̂ / (√v̂ + eps) + weight_decay · parameter. `direction` may be `gradient`.
/// The norms are summed in an order that depends on `element_count` alone.
LambNorms lamb_direction(const UpdateRule& rule, std::uint64_t step, const std::byte* parameters,
                         const std::byte* gradient, std::span<std::byte* const> states, std::byte* direction,
                         std::size_t element_count, DType dtype);

/// LAMB's second half: parameters -= lr · ratio · direction, where ratio = ‖parameters‖ / ‖direction‖ of
/// the whole layer, 1 where one of them is zero.
void lamb_apply(const UpdateRule& rule, const LambNorms& norms, std::byte* parameters, const std::byte* direction,
                std::size_t element_count, DType dtype);

/// The same compiled for `isa`, which this CPU must have, so that tests can compare them.
void update_with(Isa isa, const UpdateRule& rule, std::uint64_t step, std::byte* parameters, const std::byte* gradient,
                 std::span<std::byte* const> states, std::size_t element_count, DType dtype);
LambNorms lamb_direction_with(Isa isa, const UpdateRule& rule, std::uint64_t step, const std::byte* parameters,
                              const std::byte* gradient, std::span<std::byte* const> states, std::byte* direction,
                              std::size_t element_count, DType dtype);
void lamb_apply_with(Isa isa, const UpdateRule& rule, const LambNorms& norms, std::byte* parameters,
                     const std::byte* direction, std::size_t element_count, DType dtype);

}  // namespace poseidon::kernel
