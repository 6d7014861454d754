// Bindings of poseidon/update.h.
#include "poseidon/update.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

namespace {

/// Makes a rule from keywords, which are the names of the kind's values.
UpdateRule rule_from(const std::string& kind, bool keeps_gradient, const std::string& aggregator,
                     const nb::kwargs& values) {
  std::vector<std::pair<std::string, double>> numbers;
  for (const auto& [name, value] : values)
    numbers.emplace_back(nb::cast<std::string>(name), static_cast<double>(nb::float_(value)));
  UpdateRule rule = value_of(make_update_rule(kind, numbers));
  rule.keeps_gradient = keeps_gradient;
  raise_if_failed(check_aggregator_name(aggregator));
  rule.aggregator = aggregator;
  return rule;
}

}  // namespace

void bind_update(nb::module_& module) {
  nb::class_<UpdateRule>(module, "UpdateRule",
                         "How servers update a layer (include/poseidon/update.h). The keywords are the values of the "
                         "kind. `aggregator` is the name of what reduces the ranks' "
                         "contributions (include/poseidon/aggregate.h); the servers have to know it.")
      .def(
          "__init__",
          [](UpdateRule* self, const std::string& kind, bool keeps_gradient, const std::string& aggregator,
             const nb::kwargs& values) { new (self) UpdateRule(rule_from(kind, keeps_gradient, aggregator, values)); },
          nb::arg("kind"), nb::kw_only(), nb::arg("keeps_gradient") = false,
          nb::arg("aggregator") = std::string(kSumAggregator), nb::arg("values"))
      .def_prop_ro("state_count", [](const UpdateRule& rule) { return update_state_count(rule); })
      .def("__eq__", [](const UpdateRule& a, const UpdateRule& b) { return a == b; });
  module.attr("GRADIENT_ARRAY") = kGradientArray;
}

}  // namespace poseidon::bindings
