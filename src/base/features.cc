#include "poseidon/features.h"

#include <iterator>

namespace poseidon {

namespace {

// The last one of each array is no clause, because an array has at least one.
#define POSEIDON_CLAUSE(property, why) {Property::property, why},
#define POSEIDON_FEATURE(name, written, present, needs, breaks, remedy) \
  constexpr FeatureClause needs_of_##name[] = {needs{}};                \
  constexpr FeatureClause breaks_of_##name[] = {breaks{}};
#include "poseidon/features.def"

template <std::size_t Size>
constexpr std::span<const FeatureClause> clauses(const FeatureClause (&all)[Size]) {
  return std::span(all, Size - 1);
}

constexpr FeatureFacts kFeatures[] = {
#define POSEIDON_FEATURE(name, written, present, needs, breaks, remedy) \
  {#name, written, clauses(needs_of_##name), clauses(breaks_of_##name), remedy},
#include "poseidon/features.def"
};
static_assert(std::size(kFeatures) <= 32, "a FeatureSet has 32 bits");

constexpr PropertyFacts kProperties[] = {
#define POSEIDON_PROPERTY(name, text) {#name, text},
#include "poseidon/features.def"
};

/// Why a feature needs or breaks the property; null if it does not.
const FeatureClause* clause_of(std::span<const FeatureClause> clauses, Property property) {
  for (const FeatureClause& clause : clauses)
    if (clause.property == property) return &clause;
  return nullptr;
}

std::string written_with(const FeatureFacts& feature, std::string_view value) {
  std::string text(feature.written);
  if (const auto place = text.find("{}"); place != std::string::npos) text.replace(place, 2, value);
  return text;
}

/// Says why `one` cannot be with `other`, which breaks what it needs. The text is empty if it can.
std::string objection(const FeatureFacts& one, const FeatureFacts& other, std::string_view value) {
  for (const FeatureClause& need : one.needs)
    if (const FeatureClause* broken = clause_of(other.breaks, need.property); broken != nullptr) {
      const std::string needing = written_with(one, value), breaking = written_with(other, value);
      return refusal_of({needing, need.why, one.remedy}, {breaking, broken->why, other.remedy});
    }
  return "";
}

}  // namespace

std::span<const PropertyFacts> all_properties() { return kProperties; }

std::span<const FeatureFacts> all_features() { return kFeatures; }

std::string refusal_of(const FeatureSide& needing, const FeatureSide& breaking) {
  std::string text;
  for (const std::string_view part :
       {needing.written, std::string_view(" and "), breaking.written, std::string_view(" exclude each other: "),
        needing.written, std::string_view(" "), needing.why, std::string_view(", and "), breaking.written,
        std::string_view(" "), breaking.why, std::string_view("; "), breaking.remedy, std::string_view(", or "),
        needing.remedy})
    text += part;
  return text;
}

FeatureSet::FeatureSet(const Options& options) {
#define POSEIDON_FEATURE(name, written, present, needs, breaks, remedy) \
  if (present) add(Feature::name);
#include "poseidon/features.def"
}

bool FeatureSet::keeps(Property property) const {
  for (std::size_t i = 0; i < std::size(kFeatures); ++i)
    if (has(static_cast<Feature>(i)) && clause_of(kFeatures[i].breaks, property) != nullptr) return false;
  return true;
}

Status FeatureSet::check() const { return check(""); }

Status FeatureSet::check_with(Feature feature, std::string_view value) const {
  FeatureSet all = *this;
  all.add(feature);
  return all.check(value);
}

Status FeatureSet::check(std::string_view value) const {
  for (std::size_t i = 0; i < std::size(kFeatures); ++i)
    for (std::size_t k = 0; k < std::size(kFeatures); ++k) {
      if (!has(static_cast<Feature>(i)) || !has(static_cast<Feature>(k))) continue;
      if (std::string why = objection(kFeatures[i], kFeatures[k], value); !why.empty())
        return {ErrorCode::invalid_argument, std::move(why)};
    }
  return {};
}

}  // namespace poseidon
