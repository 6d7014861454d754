// What a job may combine: which features exclude each other, and why. The table features.def says what each feature
// needs and breaks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon {

/// What is true of a running job unless a feature breaks it.
enum class Property : std::uint8_t {
#define POSEIDON_PROPERTY(name, text) name,
#include "poseidon/features.def"  // IWYU pragma: keep
};

/// A feature of the core, by its name in features.def.
enum class Feature : std::uint8_t {
#define POSEIDON_FEATURE(name, written, present, needs, breaks, remedy) name,
#include "poseidon/features.def"  // IWYU pragma: keep
};

/// A row of the table of properties.
struct PropertyFacts {
  std::string_view name;
  std::string_view text;
};

/// A property, and why a feature needs or breaks it: what follows the feature's name in a message.
struct FeatureClause {
  Property property{};
  std::string_view why;
};

/// A row of the table of features.
struct FeatureFacts {
  std::string_view name;
  std::string_view written;  // what users write for it; {} in it is the value that they give
  std::span<const FeatureClause> needs;
  std::span<const FeatureClause> breaks;
  std::string_view remedy;  // how to do without it
};

/// All rows of the table, in its order. A value of the enumeration is an index.
std::span<const PropertyFacts> all_properties();
std::span<const FeatureFacts> all_features();

/// One of two features that exclude each other. `why` is that of its clause.
struct FeatureSide {
  std::string_view written;
  std::string_view why;
  std::string_view remedy;
};
/// Says that a feature which needs a property and one which breaks it exclude each other, why, and what to do.
std::string refusal_of(const FeatureSide& needing, const FeatureSide& breaking);

/// Features that a job has.
class FeatureSet {
 public:
  FeatureSet() = default;
  /// Those whose conditions hold for these options.
  explicit FeatureSet(const Options& options);

  /// Adds a feature that no options tell of, or all those of another set.
  void add(Feature feature) { bits_ |= 1u << static_cast<unsigned>(feature); }
  void add(const FeatureSet& others) { bits_ |= others.bits_; }
  /// Whether the job has the feature.
  bool has(Feature feature) const { return (bits_ >> static_cast<unsigned>(feature) & 1u) != 0; }
  /// Whether the property is true: none of the features breaks it.
  bool keeps(Property property) const;
  /// ErrorCode::invalid_argument if two of the features exclude each other. The text names both, as users write them,
  /// and says why and what to do.
  Status check() const;
  /// The same, of these features and one that lasts no longer than a call. Users give it the `value`.
  Status check_with(Feature feature, std::string_view value) const;

 private:
  Status check(std::string_view value) const;

  std::uint32_t bits_ = 0;
};

}  // namespace poseidon
