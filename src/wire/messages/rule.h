// rule: how a unit's parameters are updated from a step on.
#pragma once

#include <span>

#include "poseidon/status.h"
#include "poseidon/update.h"
#include "wire/messages/text_message.h"

namespace poseidon::wire {

/// Header: rank of the sender; unit; the step from which on the rule holds. Payload: the rule, without its count of
/// updates, which the server keeps.
struct Rule {
  UpdateRule rule;

  /// ErrorCode::mismatch for what is no rule: see decode_update_rule.
  static Result<Rule> read(std::span<const std::byte> payload);
  /// A message about `about`.
  TextMessage make(const Envelope& about) const;
};

}  // namespace poseidon::wire
