// The kinds of update rules that this process knows: the built-in ones and those that have been registered.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/named_registry.h"
#include "kernel/update_rules/built_in.h"

// There is one line for each built-in kind. It names the kind's function, which the kind's file in this folder defines.
#define POSEIDON_BUILT_IN_RULES(add) add(sgd) add(adam) add(adamw) add(lamb)

namespace poseidon {

namespace kernel {

#define POSEIDON_DECLARE(rule) BuiltInRule rule();
POSEIDON_BUILT_IN_RULES(POSEIDON_DECLARE)
#undef POSEIDON_DECLARE

std::span<const BuiltInRule> built_in_rules() {
#define POSEIDON_CALL(rule) rule(),
  static const std::array rules{POSEIDON_BUILT_IN_RULES(POSEIDON_CALL)};
#undef POSEIDON_CALL
  return rules;
}

}  // namespace kernel

namespace {

Status invalid(const std::string& what) { return {ErrorCode::invalid_argument, what}; }

/// Returns text such as "0 or 1", "at least 0.000000" or "from 0.000000 to 2.000000".
std::string range_of(const UpdateValue& value) {
  using Limits = std::numeric_limits<double>;
  if (value.is_flag) return "0 or 1";
  if (value.most == Limits::max()) return concat("at least ", value.least);
  if (value.least == Limits::lowest()) return concat("at most ", value.most);
  return concat("from ", value.least, " to ", value.most);
}

/// The built-in kinds for the best instruction set of this CPU.
std::list<UpdateKind> built_in_kinds() {
  std::list<UpdateKind> kinds;
  for (const kernel::BuiltInRule& rule : kernel::built_in_rules()) {
    UpdateKind& kind = kinds.emplace_back(rule.kind);
    kind.update_float32 = [update = rule.update_float32](const UpdateCall<float>& call) {
      update(kernel::best_isa(), call);
    };
    kind.update_float64 = [update = rule.update_float64](const UpdateCall<double>& call) {
      update(kernel::best_isa(), call);
    };
  }
  return kinds;
}

/// These, and those that are registered.
NamedRegistry<UpdateKind>& registry() {
  static NamedRegistry<UpdateKind> all(built_in_kinds());
  return all;
}

}  // namespace

Status register_update_rule(UpdateKind kind) {
  const std::string about = "update rule '" + kind.name + "' ";
  if (!is_name(kind.name, kMaxUpdateNameBytes) || kind.name == "none")
    return invalid(concat(about, "needs a name of 1 to ", kMaxUpdateNameBytes,
                          " lower-case letters, digits and underscores, other than none"));
  if (kind.values.size() > kMaxUpdateValues)
    return invalid(concat(about, "has ", kind.values.size(), " values, at most ", kMaxUpdateValues, " are allowed"));
  for (std::size_t i = 0; i < kind.values.size(); ++i) {
    const UpdateValue& value = kind.values[i];
    const auto earlier = std::span(kind.values).first(i);
    if (!is_name(value.name, kMaxUpdateNameBytes) ||
        std::ranges::find(earlier, value.name, &UpdateValue::name) != earlier.end())
      return invalid(concat(about, "has a value '", value.name, "'; its values need different names of 1 to ",
                            kMaxUpdateNameBytes, " lower-case letters, digits and underscores"));
  }
  if (!kind.state_count || !kind.update_float32 || !kind.update_float64)
    return invalid(about + "lacks a function: state_count, update_float32 and update_float64 are needed");
  if (!registry().add(std::move(kind))) return invalid(about + "is registered already; choose another name");
  return {};
}

const UpdateKind* find_update_rule(std::string_view name) { return registry().find(name); }

std::vector<std::string> update_rule_names() { return registry().names(); }

Status UpdateRule::set(std::string_view name, double number) {
  const std::string text(name);
  if (kind == nullptr)
    return invalid("the update rule none has no value '" + text + "'; name another rule, or leave it out");
  const auto found = std::ranges::find(kind->values, name, &UpdateValue::name);
  if (found == kind->values.end()) {
    std::vector<std::string> names;
    for (const UpdateValue& value : kind->values) names.push_back(value.name);
    return invalid("update rule " + kind->name + " has no value '" + text + "'; it has " + list_of(names));
  }
  if (!std::isfinite(number)) return invalid("update rule " + kind->name + " has " + text + ", which must be finite");
  const bool fits = number >= found->least && number <= found->most;
  if (!fits || (found->is_flag && number != 0 && number != 1))
    return invalid(
        concat("update rule ", kind->name, " has ", text, "=", number, ", which must be ", range_of(*found)));
  values[static_cast<std::size_t>(found - kind->values.begin())] = number;
  return {};
}

Result<UpdateRule> make_update_rule(std::string_view kind, const std::vector<std::pair<std::string, double>>& values) {
  UpdateRule rule;
  if (kind != "none" && (rule.kind = find_update_rule(kind)) == nullptr)
    return invalid("there is no update rule '" + std::string(kind) + "'; this process knows the rules none, " +
                   list_of(update_rule_names()));
  if (rule.kind != nullptr)
    for (std::size_t i = 0; i < rule.kind->values.size(); ++i) rule.values[i] = rule.kind->values[i].initial;
  for (const auto& [name, number] : values)
    if (Status status = rule.set(name, number); !status.ok()) return status;
  return rule;
}

std::size_t update_state_count(const UpdateRule& rule) {
  return rule.kind == nullptr ? 0 : rule.kind->state_count(rule.values);
}

}  // namespace poseidon
