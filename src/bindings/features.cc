// Bindings of poseidon/features.h: the table, for python/poseidon/adapter/features.py.
#include "poseidon/features.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings/bindings.h"

namespace poseidon::bindings {

namespace {

nb::dict clauses(std::span<const FeatureClause> given) {
  nb::dict found;
  for (const FeatureClause& clause : given)
    found[nb::cast(all_properties()[static_cast<std::size_t>(clause.property)].name)] = clause.why;
  return found;
}

nb::dict properties() {
  nb::dict found;
  for (const PropertyFacts& property : all_properties()) found[nb::cast(property.name)] = property.text;
  return found;
}

nb::list feature_rows() {
  nb::list rows;
  for (const FeatureFacts& feature : all_features()) {
    nb::dict row;
    row["name"] = feature.name;
    row["written"] = feature.written;
    row["needs"] = clauses(feature.needs);
    row["breaks"] = clauses(feature.breaks);
    row["remedy"] = feature.remedy;
    rows.append(std::move(row));
  }
  return rows;
}

nb::list features_of(const Options& options) {
  const FeatureSet present(options);
  nb::list names;
  for (std::size_t i = 0; i < all_features().size(); ++i)
    if (present.has(static_cast<Feature>(i))) names.append(all_features()[i].name);
  return names;
}

std::string refusal(const std::string& needing, const std::string& needs, const std::string& needing_remedy,
                    const std::string& breaking, const std::string& breaks, const std::string& breaking_remedy) {
  return refusal_of({needing, needs, needing_remedy}, {breaking, breaks, breaking_remedy});
}

}  // namespace

void bind_features(nb::module_& module) {
  module.def("properties", &properties, "Name of each property of poseidon/features.def to its sentence.");
  module.def("feature_rows", &feature_rows, "The features of poseidon/features.def, in their order, as dicts.");
  module.def("features_of", &features_of, nb::arg("options"), "The names of the features that these options give.");
  module.def("refusal", &refusal, nb::arg("needing"), nb::arg("needs"), nb::arg("needing_remedy"), nb::arg("breaking"),
             nb::arg("breaks"), nb::arg("breaking_remedy"),
             "Says that two features exclude each other: what users write for each, why it needs or breaks a property, "
             "and how to do without it.");
}

}  // namespace poseidon::bindings
