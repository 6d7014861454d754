// FeatureSet: which features of the core exclude each other, by the table features.def.
#include "poseidon/features.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

namespace poseidon {
namespace {

FeatureSet set_of(const std::function<void(Options&)>& change) {
  Options options;
  options.world_size = 2;
  change(options);
  return FeatureSet(options);
}

void drop(Options& options) { options.stragglers = Stragglers::drop; }
void ssp(Options& options) { options.consistency = Consistency::ssp; }
void async(Options& options) { options.consistency = Consistency::async; }

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(Features, AJobWithoutOptionsKeepsEveryProperty) {
  const FeatureSet none{Options()};
  for (std::size_t i = 0; i < all_properties().size(); ++i) EXPECT_TRUE(none.keeps(static_cast<Property>(i)));
  EXPECT_TRUE(none.check().ok());
}

TEST(Features, PairsThatExcludeEachOtherAreRefused) {
  const std::function<void(Options&)> refused[] = {
      [](Options& o) { drop(o), o.on_failure = OnFailure::rejoin; },
      [](Options& o) { drop(o), o.on_failure = OnFailure::shrink; },
      [](Options& o) { ssp(o), o.on_failure = OnFailure::rejoin; },
      [](Options& o) { async(o), o.on_failure = OnFailure::shrink; },
      [](Options& o) { drop(o), ssp(o); },
      [](Options& o) { drop(o), async(o); },
      [](Options& o) { drop(o), o.aggregation = Aggregation::wide; },
      [](Options& o) { drop(o), o.reduce_order = ReduceOrder::arrival; },
      [](Options& o) { drop(o), o.assignment = Assignment::worker; },
      [](Options& o) { ssp(o), o.checkpoint_dir = "/tmp"; },
      [](Options& o) { async(o), o.checkpoint_dir = "/tmp"; },
  };
  for (const auto& change : refused) {
    const Status status = set_of(change).check();
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(status.message(), " exclude each other: ")) << status.message();
  }
}

TEST(Features, WhatGoesTogetherIsTaken) {
  EXPECT_TRUE(set_of([](Options& o) { drop(o), o.checkpoint_dir = "/tmp"; }).check().ok());
  EXPECT_TRUE(set_of([](Options& o) { ssp(o), o.aggregation = Aggregation::wide; }).check().ok());
  EXPECT_TRUE(set_of([](Options& o) { o.on_failure = OnFailure::shrink, o.checkpoint_dir = "/tmp"; }).check().ok());
  // One worker repeats nothing together with others.
  EXPECT_TRUE(set_of([](Options& o) { drop(o), o.on_failure = OnFailure::rejoin, o.world_size = 1; }).check().ok());
}

TEST(Features, ARefusalNamesBothFeaturesTheReasonsAndTheRemedies) {
  const auto both = set_of([](Options& o) { drop(o), o.on_failure = OnFailure::rejoin; });
  EXPECT_EQ(both.check().message(),
            "on_failure=rejoin and stragglers=drop exclude each other: on_failure=rejoin makes all ranks repeat a step "
            "together, and stragglers=drop lets ranks be in different steps; use stragglers=wait, or use "
            "on_failure=abort");
}

TEST(Features, SumsOfMachinesExcludeWhatLeavesRanksOut) {
  for (const auto& change : {drop, ssp, async}) {
    FeatureSet features = set_of(change);
    EXPECT_TRUE(features.check().ok());
    features.add(Feature::sums_of_machines);
    EXPECT_TRUE(contains(features.check().message(), "reduce_by_host=off"));
  }
  FeatureSet alone;
  alone.add(Feature::sums_of_machines);
  EXPECT_TRUE(alone.check().ok());
  EXPECT_FALSE(alone.keeps(Property::own_gradients));
}

TEST(Features, WhatACallAsksForIsNamedWithItsValueAndNotKept) {
  for (const auto& change : {ssp, async}) {
    const FeatureSet features = set_of(change);
    for (const Feature asked : {Feature::aggregator, Feature::scaling_rule})
      EXPECT_TRUE(contains(features.check_with(asked, "this one").message(), "this one and consistency="));
    EXPECT_TRUE(features.check().ok());
  }
  EXPECT_TRUE(set_of(drop).check_with(Feature::aggregator, "median").ok());
  EXPECT_TRUE(set_of(drop).check_with(Feature::scaling_rule, "adam").ok());
}

TEST(Features, EveryRowIsComplete) {
  std::set<std::string_view> written;
  for (const FeatureFacts& feature : all_features()) {
    EXPECT_TRUE(written.insert(feature.written).second) << feature.written;
    EXPECT_FALSE(feature.remedy.empty()) << feature.written;
    EXPECT_FALSE(feature.needs.empty() && feature.breaks.empty()) << feature.written;
    for (const auto& side : {feature.needs, feature.breaks})
      for (const FeatureClause& clause : side) EXPECT_FALSE(clause.why.empty()) << feature.written;
  }
  for (const PropertyFacts& property : all_properties()) EXPECT_TRUE(property.text.ends_with('.')) << property.name;
}

}  // namespace
}  // namespace poseidon
