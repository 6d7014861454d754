#include "wire/update_rule.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/crc32c.h"
#include "base/named_registry.h"

namespace poseidon::wire {

namespace {

constexpr std::size_t kNameAt = 0;
constexpr std::size_t kKeepsGradientAt = kMaxUpdateNameBytes;
constexpr std::size_t kValueCountAt = kKeepsGradientAt + 1;
constexpr std::size_t kValueNamesAt = kKeepsGradientAt + 4;
constexpr std::size_t kValuesAt = kKeepsGradientAt + 8;
constexpr std::size_t kAggregatorAt = kValuesAt + kMaxUpdateValues * sizeof(double);

Status bad_rule(const std::string& why) { return {ErrorCode::mismatch, "an update rule " + why}; }

/// Tells whether both ends mean the same values by the same numbers.
std::uint32_t checksum_of_names(const UpdateKind& kind) {
  constexpr std::array end_of_name{std::byte{'\n'}};
  std::uint32_t checksum = 0;
  for (const UpdateValue& value : kind.values)
    checksum = crc32c(end_of_name, crc32c(std::as_bytes(std::span(value.name)), checksum));
  return checksum;
}

/// Reads a text that is padded with zeros.
std::string name_at(std::span<const std::byte> bytes, std::size_t at, std::size_t size_bytes) {
  const std::string_view padded(reinterpret_cast<const char*>(bytes.data()) + at, size_bytes);
  return std::string(padded.substr(0, padded.find('\0')));
}

}  // namespace

std::array<std::byte, kUpdateRuleBytes> encode_update_rule(const UpdateRule& rule) {
  std::array<std::byte, kUpdateRuleBytes> bytes{};
  bytes[kKeepsGradientAt] = static_cast<std::byte>(rule.keeps_gradient);
  std::memcpy(bytes.data() + kAggregatorAt, rule.aggregator.data(), rule.aggregator.size());
  if (rule.kind == nullptr) return bytes;
  const UpdateKind& kind = *rule.kind;
  std::memcpy(bytes.data() + kNameAt, kind.name.data(), kind.name.size());
  bytes[kValueCountAt] = static_cast<std::byte>(kind.values.size());
  const std::uint32_t checksum = checksum_of_names(kind);
  std::memcpy(bytes.data() + kValueNamesAt, &checksum, sizeof checksum);
  std::memcpy(bytes.data() + kValuesAt, rule.values.data(), kind.values.size() * sizeof(double));
  return bytes;
}

std::uint32_t digest_of(const UpdateRule& rule) {
  return rule == UpdateRule() ? 0 : std::max<std::uint32_t>(1, crc32c(encode_update_rule(rule)));
}

Status check_rule_with(const FeatureSet& present, const UpdateRule& rule) {
  Status status;
  if (rule.aggregator != kSumAggregator) status = present.check_with(Feature::aggregator, rule.aggregator);
  if (status.ok() && rule.kind != nullptr && !rule.kind->takes_parts)
    status = present.check_with(Feature::scaling_rule, rule.kind->name);
  return status;
}

Result<UpdateRule> decode_update_rule(std::span<const std::byte> bytes) {
  if (bytes.size() != kUpdateRuleBytes) return bad_rule(concat("has ", bytes.size(), " bytes"));
  const std::string name = name_at(bytes, kNameAt, kMaxUpdateNameBytes);
  UpdateRule rule;
  if (!name.empty() && (rule.kind = find_update_rule(name)) == nullptr)
    return bad_rule("of unknown kind '" + name + "'; this process knows the rules none, " +
                    list_of(update_rule_names()) + "; register any other here, too (register_update_rule)");
  rule.aggregator = name_at(bytes, kAggregatorAt, kMaxAggregatorNameBytes);
  if (Status status = check_aggregator_name(rule.aggregator); !status.ok())
    return bad_rule("whose " + status.message());
  rule.keeps_gradient = bytes[kKeepsGradientAt] != std::byte{0};
  for (std::size_t i = 0; rule.kind != nullptr && i < rule.kind->values.size(); ++i) {
    double value = 0;
    std::memcpy(&value, bytes.data() + kValuesAt + i * sizeof(double), sizeof(double));
    if (Status status = rule.set(rule.kind->values[i].name, value); !status.ok())
      return bad_rule("with a wrong number: " + status.message());
  }
  // What encodes to other bytes has other values here, or is garbage.
  if (!std::ranges::equal(encode_update_rule(rule), bytes))
    return bad_rule("of kind '" + (name.empty() ? "none" : name) +
                    "' that has other values than this process knows; install the same version everywhere");
  return rule;
}

}  // namespace poseidon::wire
