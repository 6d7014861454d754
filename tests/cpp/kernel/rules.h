// Update rules, for tests.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "poseidon/update.h"

namespace poseidon::testing {

inline UpdateRule rule_of(const std::string& kind, const std::vector<std::pair<std::string, double>>& values = {}) {
  const auto rule = make_update_rule(kind, values);
  EXPECT_TRUE(rule.ok()) << rule.status().message();
  return rule.ok() ? rule.value() : UpdateRule();
}

/// Returns the rule with another number for one of its values.
inline UpdateRule with(UpdateRule rule, const std::string& value, double number) {
  const Status status = rule.set(value, number);
  EXPECT_TRUE(status.ok()) << status.message();
  return rule;
}

/// Returns the number of one of the rule's values, or 0 if the kind has no value of this name.
inline double value_of(const UpdateRule& rule, const std::string& value) {
  for (std::size_t i = 0; rule.kind != nullptr && i < rule.kind->values.size(); ++i)
    if (rule.kind->values[i].name == value) return rule.values[i];
  return 0;
}

}  // namespace poseidon::testing
