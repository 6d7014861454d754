// Random calls of collectives, with what each rank gives and what it should have afterwards. Numbers are whole: sums
// are exact in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "poseidon/collective.h"

namespace poseidon::testing {

/// Whole numbers, whose sums are exact, that differ between ranks, calls and places.
std::vector<float> numbers(std::size_t count, std::uint64_t seed);

inline std::span<const std::byte> bytes(const std::vector<float>& values) { return std::as_bytes(std::span(values)); }
inline std::span<std::byte> bytes(std::vector<float>& values) { return std::as_writable_bytes(std::span(values)); }

/// What call `number` gives rank `from` for rank `to`.
std::vector<float> given(std::size_t count, std::uint64_t number, std::size_t from, std::size_t to = 0);
/// The reduction of what all ranks give rank `to`.
std::vector<float> reduced(std::size_t ranks, std::size_t count, std::uint64_t number, ReduceOp op, std::size_t to = 0);

/// A call that all ranks make.
struct RandomCall {
  CollectiveKind kind;
  ReduceOp op;
  std::size_t count;
  std::uint32_t root;
};

/// As many calls among so many ranks, of any kind.
std::vector<RandomCall> random_calls(std::size_t ranks, std::size_t how_many, unsigned seed);

/// The memory of a call on one rank, and what it should be afterwards.
struct Prepared {
  CollectiveCall call;
  std::vector<std::vector<float>> inputs, outputs, expected;
};

/// Call `number` on one of the ranks.
Prepared prepare(const RandomCall& random, std::uint64_t number, std::size_t rank, std::size_t ranks);

}  // namespace poseidon::testing
