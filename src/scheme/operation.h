// Operation: what a worker asks of the servers and peers for one unit, and what it contributes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "poseidon/client.h"
#include "poseidon/dtype.h"
#include "poseidon/update.h"

namespace poseidon {

/// This worker has no gradient for the unit in this step.
struct NoGradient {};

struct DenseGradient {
  std::span<const std::byte> data;
  std::uint64_t factor_count = kNotFactorable;  // the K that it would have as factors
};

/// A gradient as the factors that it is the product of.
struct FactoredGradient {
  DType dtype = DType::float32;
  std::vector<FactorRows> rows;
  bool accumulate = false;  // the product is added to what the result's memory holds
};

/// The gradients of a group's members, in the unit's layout. The last piece is the group's footer.
struct GroupedGradients {
  std::vector<std::span<const std::byte>> pieces;
  /// Where the result goes, by member, if this worker contributed to all of them and cannot be late. Empty
  /// otherwise: then the footer of the whole result has to be read first.
  std::vector<std::span<std::byte>> members;
};

using Gradient = std::variant<NoGradient, DenseGradient, FactoredGradient, GroupedGradients>;

/// Contributes to a step. Client::start and Client::push_pull receive the step's result, Client::push does not.
struct Push {
  Gradient gradient;
  std::uint32_t divisor = 1;
  /// This rank is catching up: it sends nothing, and the mean does not count it.
  bool excluded_from_mean = false;
  bool wants_result = true;
  std::span<std::byte> destination{};  // of the result; empty for a group and where factors are only gathered
  std::optional<UpdateRule> rule{};    // for the servers, from this step on
};

/// Receives an array that the servers keep.
struct Pull {
  std::span<std::byte> destination;
  std::uint32_t array = 0;  // 0: the value; 1 and more: the update rule's state
};

/// Sets an array that the servers keep.
struct Assign {
  std::span<const std::byte> data;
  std::uint32_t array = 0;  // as in Pull
  std::uint64_t update_count = 0;
};

/// The servers take an array from their checkpoint; this worker receives its value.
struct Restore {
  std::span<std::byte> destination;
  std::uint64_t version_limit = 0;  // the newest version that may be taken; 0: any
};

using Operation = std::variant<Push, Pull, Assign, Restore>;

/// K of this worker's contribution: 0 without one, wire::kUnboundedFactors at most.
std::uint32_t factor_count_of(const Gradient& gradient);

/// Where the operation's result goes; empty where it has none, or none of its own.
std::span<std::byte> destination_of(const Operation& operation);

/// The bytes that the operation sends as they are: a dense gradient or an assigned array; empty for others.
std::span<const std::byte> data_of(const Operation& operation);

}  // namespace poseidon
