#include "wire/messages.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

namespace poseidon::wire {

namespace {

std::string as_text(std::span<const std::byte> payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

TextMessage with_text(Header header, std::string text) {
  text.resize(std::min(text.size(), kMaxTextBytes));
  header.payload_bytes = text.size();
  return {header, std::make_shared<const std::string>(std::move(text))};
}

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

bool is_job_name(const std::string& name) {
  return !name.empty() && name.size() <= kMaxJobNameBytes && name.find('\n') == std::string::npos;
}

TextMessage make_hello(const Hello& hello) {
  Header header;
  header.kind = Kind::hello;
  header.rank = hello.rank;
  header.worker_count = hello.worker_count;
  header.chunk = hello.flow;
  header.rows = hello.priority_class;
  header.step = hello.generation;
  if (hello.pace) write_pace(*hello.pace, header);
  std::string text = hello.job + '\n' + hello.run;
  for (const auto& address : hello.other_cores) text += '\n' + address;
  return with_text(header, std::move(text));
}

TextMessage make_error(Kind kind, const Header& about, const Status& status) {
  Header header;
  header.kind = kind;
  header.rank = about.rank;
  header.worker_count = about.worker_count;
  header.unit = about.unit;
  header.chunk = about.chunk;
  header.step = about.step;
  header.divisor = static_cast<std::uint32_t>(status.code());
  return with_text(header, status.message());
}

TextMessage make_rule(const Header& about, const UpdateRule& rule) {
  std::string bytes(kRuleBytes, '\0');
  bytes[kRuleKindAt] = static_cast<char>(rule.kind);
  bytes[kRuleNesterovAt] = static_cast<char>(rule.nesterov);
  bytes[kRuleMaximizeAt] = static_cast<char>(rule.maximize);
  bytes[kRuleKeepsGradientAt] = static_cast<char>(rule.keeps_gradient);
  for (std::size_t i = 0; i < kRuleNumbers.size(); ++i)
    std::memcpy(bytes.data() + kRuleNumbersAt + i * sizeof(double), &(rule.*kRuleNumbers[i]), sizeof(double));
  Header header = about;
  header.kind = Kind::rule;
  return with_text(header, std::move(bytes));
}

Result<UpdateRule> read_rule(std::span<const std::byte> payload) {
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
  return rule;
}

Hello read_hello(const Header& header, std::span<const std::byte> payload) {
  constexpr std::uint64_t last = std::numeric_limits<std::uint32_t>::max();
  const auto generation = static_cast<std::uint32_t>(std::min(header.step, last));
  Hello hello{header.rank, header.worker_count, {}, header.chunk, {}, header.rows, generation, read_pace(header), {}};
  std::istringstream lines(as_text(payload));
  std::getline(lines, hello.job);
  std::getline(lines, hello.run);
  for (std::string address; std::getline(lines, address);) hello.other_cores.push_back(address);
  return hello;
}

Status read_error(const Header& header, std::span<const std::byte> payload) {
  const bool known = header.divisor > 0 && header.divisor <= static_cast<std::uint32_t>(ErrorCode::shut_down);
  return {known ? static_cast<ErrorCode>(header.divisor) : ErrorCode::aborted, as_text(payload)};
}

}  // namespace poseidon::wire
