#include "wire/messages/rule.h"

#include "wire/body.h"
#include "wire/update_rule.h"

namespace poseidon::wire {

constinit const BodyShape BodyShapes::rule{};

TextMessage Rule::make(const Envelope& about) const {
  const auto bytes = encode_update_rule(rule);
  Header header{about, {}};
  header.kind = Kind::rule;
  return with_text(header, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

Result<Rule> Rule::read(std::span<const std::byte> payload) {
  const auto rule = decode_update_rule(payload);
  if (!rule.ok()) return rule.status();
  return Rule{rule.value()};
}

}  // namespace poseidon::wire
