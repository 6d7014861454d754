// Operation: what a worker asks of the servers and peers for one unit, and what it contributes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "poseidon/client.h"
#include "poseidon/dtype.h"
#include "poseidon/update.h"

namespace poseidon {

/// The worker has no gradient for the unit in this step.
struct NoGradient {};

struct DenseGradient {
  std::span<const std::byte> data;
  std::uint64_t factor_count = kNotFactorable;  // the K that the gradient would have as factors
};

/// A gradient, given as the factors whose product it is.
struct FactoredGradient {
  DType dtype = DType::float32;
  std::vector<FactorRows> rows;
  bool accumulate = false;  // the product is added to what the result's memory holds
};

/// The gradients of a group's members, in the unit's layout. The last piece is the group's footer.
struct GroupedGradients {
  Pieces pieces;
  /// Where the result goes, by member. It is set only if this worker contributed to all members and cannot be late.
  /// Otherwise it is empty, because the footer of the whole result has to be read first.
  std::vector<std::span<std::byte>> members;
};

using Gradient = std::variant<NoGradient, DenseGradient, FactoredGradient, LayerRows, GroupedGradients>;

/// Contributes to a step. Client::start and Client::push_pull receive the step's result; Client::push does not.
struct Push {
  Gradient gradient;
  std::uint32_t divisor = 1;
  /// This rank is catching up. It sends nothing, and the mean does not count it.
  bool excluded_from_mean = false;
  bool wants_result = true;
  /// A stored value comes back as the plan says (Unit::result_dtype). Otherwise it comes as the servers keep it.
  bool rounds_result = true;
  std::span<std::byte> destination{};  // where the result goes; empty for a group, for gathered factors and for rows
  std::optional<UpdateRule> rule{};    // a rule for the servers, from this step on
  std::uint32_t rule_digest = 0;       // of the rule that this rank has set (wire::digest_of)
};

/// Receives an array that the servers keep.
struct Pull {
  std::span<std::byte> destination;
  std::uint32_t array = 0;     // 0: the value; 1 and more: the update rule's state
  bool rounds_result = false;  // the value comes as a step would bring it (Unit::result_dtype)
};

/// Sets an array that the servers keep.
struct Assign {
  std::span<const std::byte> data;
  std::uint32_t array = 0;  // as in Pull
  std::uint64_t update_count = 0;
};

/// Makes the servers take an array from their checkpoint. This worker receives its value.
struct Restore {
  std::span<std::byte> destination;
  std::uint64_t version_limit = 0;  // the newest version that may be taken; 0: any
};

using Operation = std::variant<Push, Pull, Assign, Restore>;

/// Returns the K of this worker's contribution: 0 without a contribution, and at most wire::kUnboundedFactors.
std::uint32_t factor_count_of(const Gradient& gradient);

/// Returns where the operation's result goes. It is empty if the operation has no result, or no memory of its own for
/// it.
std::span<std::byte> destination_of(const Operation& operation);

/// Returns the bytes that the operation sends unchanged: a dense gradient or an assigned array. Empty for other
/// operations.
std::span<const std::byte> data_of(const Operation& operation);

}  // namespace poseidon
