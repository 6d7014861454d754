// How an update rule is written in messages and in checkpoints (docs/wire-format.md), and in which jobs it may be set.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "poseidon/features.h"
#include "poseidon/status.h"
#include "poseidon/update.h"

namespace poseidon::wire {

/// The rule is written as the name of its kind, two small numbers, a checksum of the names of its values, the values,
/// and the name of its aggregator.
inline constexpr std::size_t kUpdateRuleBytes =
    kMaxUpdateNameBytes + 8 + kMaxUpdateValues * sizeof(double) + kMaxAggregatorNameBytes;

/// The name of the aggregator must be one that check_aggregator_name allows.
std::array<std::byte, kUpdateRuleBytes> encode_update_rule(const UpdateRule& rule);

/// A checksum by which it is noticed that ranks have set different rules. 0: the default rule, which is the same as
/// none.
std::uint32_t digest_of(const UpdateRule& rule);

/// ErrorCode::invalid_argument: what the rule is excludes a feature of the job or of the server.
Status check_rule_with(const FeatureSet& present, const UpdateRule& rule);

/// ErrorCode::mismatch: the size is wrong; this process does not know the kind, or knows it with other values; a number
/// is out of its range; or no rule is written with these bytes. The text says which. The aggregator need not be known
/// here: who uses the rule looks it up.
Result<UpdateRule> decode_update_rule(std::span<const std::byte> bytes);

}  // namespace poseidon::wire
