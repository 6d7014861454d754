#include "wire/messages/rule.h"

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

namespace poseidon::wire {

namespace {

// Kind, three flags and padding to 8 bytes, then the doubles in the order of RuleNumbers.
constexpr std::size_t kRuleKindAt = 0;
constexpr std::size_t kRuleNesterovAt = 1;
constexpr std::size_t kRuleMaximizeAt = 2;
constexpr std::size_t kRuleKeepsGradientAt = 3;
constexpr std::size_t kRuleNumbersAt = 8;
constexpr std::array kRuleNumbers{&UpdateRule::lr,          &UpdateRule::momentum, &UpdateRule::dampening,
                                  &UpdateRule::beta1,       &UpdateRule::beta2,    &UpdateRule::eps,
                                  &UpdateRule::weight_decay};
constexpr std::size_t kRuleBytes = kRuleNumbersAt + kRuleNumbers.size() * sizeof(double);

Status bad_rule(const std::string& why) { return {ErrorCode::mismatch, "an update rule " + why}; }

}  // namespace

TextMessage Rule::make(Header header) const {
  std::string bytes(kRuleBytes, '\0');
  bytes[kRuleKindAt] = static_cast<char>(rule.kind);
  bytes[kRuleNesterovAt] = static_cast<char>(rule.nesterov);
  bytes[kRuleMaximizeAt] = static_cast<char>(rule.maximize);
  bytes[kRuleKeepsGradientAt] = static_cast<char>(rule.keeps_gradient);
  for (std::size_t i = 0; i < kRuleNumbers.size(); ++i)
    std::memcpy(bytes.data() + kRuleNumbersAt + i * sizeof(double), &(rule.*kRuleNumbers[i]), sizeof(double));
  header.kind = Kind::rule;
  return with_text(header, std::move(bytes));
}

Result<Rule> Rule::read(std::span<const std::byte> payload) {
  if (payload.size() != kRuleBytes) return bad_rule("has " + std::to_string(payload.size()) + " bytes");
  UpdateRule rule;
  const auto kind = std::to_integer<std::uint8_t>(payload[kRuleKindAt]);
  if (kind > static_cast<std::uint8_t>(UpdateKind::lamb)) return bad_rule("of unknown kind " + std::to_string(kind));
  rule.kind = static_cast<UpdateKind>(kind);
  rule.nesterov = payload[kRuleNesterovAt] != std::byte{0};
  rule.maximize = payload[kRuleMaximizeAt] != std::byte{0};
  rule.keeps_gradient = payload[kRuleKeepsGradientAt] != std::byte{0};
  for (std::size_t i = 0; i < kRuleNumbers.size(); ++i) {
    double number = 0;
    std::memcpy(&number, payload.data() + kRuleNumbersAt + i * sizeof(double), sizeof(double));
    if (!std::isfinite(number)) return bad_rule("with a number that is not finite");
    rule.*kRuleNumbers[i] = number;
  }
  return Rule{rule};
}

}  // namespace poseidon::wire
