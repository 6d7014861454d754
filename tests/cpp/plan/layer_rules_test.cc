// What a layer may do is the same for plans, exchanges and wishes.
#include "plan/layer_rules.h"

#include <gtest/gtest.h>

#include <random>

namespace poseidon {
namespace {

constexpr int kCases = 4000;

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}

  std::size_t below(std::size_t bound) { return std::size_t{random_()} % bound; }
  bool one_in(std::size_t count) { return below(count) == 0; }

  template <typename T>
  T of(std::initializer_list<T> values) {
    return *(values.begin() + below(values.size()));
  }

  DType dtype() {
    using enum DType;
    return of({float32, float32, float32, float64, float16, bfloat16, int64});
  }
  Scheme scheme() {
    const auto all = all_schemes();
    return one_in(2) ? Scheme::automatic : all[below(all.size())];
  }
  Scheme lossy() { return of({Scheme::automatic, Scheme::automatic, Scheme::topk, Scheme::onebit, Scheme::powersgd}); }
  WireFormat wire() {
    using enum WireFormat;
    return of({fp32, fp32, fp32, bf16, fp16, int8});
  }

  Layer layer(std::size_t number) {
    Layer layer{"layer" + std::to_string(number), dtype(), below(200'000), 0, 0, scheme()};
    if (!one_in(3)) {
      layer.rows = 1 + below(300);
      layer.cols = 1 + below(300);
      layer.element_count = layer.rows * layer.cols + (one_in(40) ? 1 : 0);
      layer.row_gradient = one_in(3);
      layer.zeros_are_missing = one_in(2);
    }
    layer.stored = one_in(6);
    layer.whole = one_in(9);
    layer.wire = wire();
    layer.parameter_wire = layer.stored && one_in(3) ? WireFormat::bf16 : WireFormat::fp32;
    layer.float32_value = layer.stored && layer.dtype == DType::bfloat16;
    layer.compression.allowed = lossy();
    layer.compression.rows = layer.rows;
    layer.compression.error_feedback = one_in(4);
    if (one_in(4)) layer.compression.factor_wire = wire();
    return layer;
  }

  LayerFacts facts() {
    LayerFacts facts;
    facts.name = "w";
    facts.who = "parameter w";
    facts.dtype = dtype();
    facts.element_count = 1 + below(200'000);
    if (one_in(4)) return facts;
    facts.rows = 1 + below(300);
    facts.element_count = facts.rows * (1 + below(300));
    facts.gives_factors = one_in(2);
    if (!facts.gives_factors) facts.gives_rows = of({RowGradient::none, RowGradient::zeros, RowGradient::sparse});
    facts.stored = facts.gives_rows != RowGradient::sparse && one_in(4);
    return facts;
  }

  LayerWishes wishes() {
    LayerWishes wishes;
    do wishes.scheme = scheme();
    while (wishes.scheme == Scheme::local);
    wishes.wire = wire();
    wishes.wire_is_given = one_in(2);
    wishes.wire_if_float = one_in(2);
    wishes.lossy = lossy();
    if (wishes.lossy == Scheme::automatic && one_in(3)) wishes.lossy_wire = of({WireFormat::bf16, WireFormat::int8});
    if (one_in(4)) wishes.factor_wire = of({WireFormat::bf16, WireFormat::fp16});
    wishes.error_feedback = one_in(4);
    wishes.parameter_wire = of({WireFormat::fp32, WireFormat::bf16});
    wishes.settles = one_in(4);
    return wishes;
  }

  Cluster cluster(int least_workers) {
    Cluster cluster;
    cluster.worker_count = cluster.server_count = least_workers + static_cast<int>(below(8));
    if (one_in(3)) cluster.placement = Placement::dedicated;
    return cluster;
  }

  Options options() {
    Options options;
    options.small_bytes = of<std::size_t>({0, 4096, 32u << 10});
    options.stragglers = one_in(4) ? Stragglers::drop : Stragglers::wait;
    if (options.stragglers == Stragglers::wait)
      options.consistency = of({Consistency::bsp, Consistency::bsp, Consistency::ssp, Consistency::async});
    return options;
  }

 private:
  std::mt19937 random_;
};

void expect_terms_of_unit(const LayerTerms& terms, const Layer& layer, const Unit& unit, const Options& options) {
  EXPECT_EQ(terms.scheme, layer.scheme);
  EXPECT_EQ(terms.wire_dtype, unit.wire_dtype);
  EXPECT_EQ(terms.factor_dtype, unit.factor_dtype);
  EXPECT_EQ(terms.result_dtype, unit.result_dtype);
  EXPECT_EQ(terms.value_dtype, unit.value_dtype);
  EXPECT_EQ(terms.kept_count, kept_count(layer));
  EXPECT_EQ(terms.keeps_rounding, keeps_rounding(layer));
  if (unit.grouped()) {
    EXPECT_TRUE(terms.grouped);
  }
  if (terms.grouped) {
    EXPECT_EQ(terms.schemes.list(), std::vector{Scheme::ps});
    EXPECT_LE(layer.size_bytes(), options.small_bytes);
    EXPECT_EQ(terms.kept_count, 0u);
  }
}

void expect_schemes_are_what_exchanges_take(const LayerTerms& terms, const Layer& layer, const Cluster& cluster) {
  for (const double count : {0.0, 1.0, 7.0, 90.0, 5000.0})
    EXPECT_TRUE(terms.schemes.contains(best_scheme(layer, count, cluster))) << layer.name << " at " << count;
  for (const Scheme scheme : automatic_schemes(layer, cluster)) {
    EXPECT_TRUE(terms.schemes.contains(scheme));
    EXPECT_EQ(best_scheme(layer, 90, cluster, {scheme, 90}), scheme);
  }
  if (chooses_exact(layer, Scheme::ps) && cluster.worker_count > 1) {
    EXPECT_EQ(best_scheme(layer, 0, cluster, {Scheme::ps, 0}), Scheme::ps);
    EXPECT_TRUE(terms.schemes.contains(Scheme::ps));
  }
}

TEST(LayerRules, TermsAreWhatAPlanHasAndRefusalsAreItsOwn) {
  Draw draw(1);
  int refused = 0;
  for (int i = 0; i < kCases; ++i) {
    const Cluster cluster = draw.cluster(1);
    const Options options = draw.options();
    std::vector<Layer> layers;
    std::vector<Result<LayerTerms>> terms;
    for (std::size_t number = 0; number < 3; ++number) {
      layers.push_back(draw.layer(number));
      terms.push_back(layer_terms(layers.back(), cluster, options));
      const auto alone = make_plan({layers.back()}, cluster, options, 0);
      ASSERT_EQ(terms.back().ok(), alone.ok()) << "case " << i;
      if (alone.ok()) continue;
      EXPECT_EQ(terms.back().status().message(), alone.status().message());
      layers.pop_back();
      terms.pop_back();
      ++refused;
    }
    const auto plan = make_plan(layers, cluster, options, 0);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (std::size_t number = 0; number < layers.size(); ++number) {
      SCOPED_TRACE("case " + std::to_string(i) + ", " + layers[number].name);
      const Layer& settled = plan.value().layers[number];
      const LayerTerms& own = plan.value().terms[number];
      EXPECT_EQ(own.scheme, terms[number].value().scheme);
      EXPECT_EQ(own.schemes, terms[number].value().schemes);
      EXPECT_EQ(own.reason, terms[number].value().reason);
      expect_terms_of_unit(own, settled, plan.value().units[plan.value().unit_of_layer[number]], options);
      expect_schemes_are_what_exchanges_take(own, settled, cluster);
    }
  }
  EXPECT_GT(refused, kCases / 4);
  EXPECT_LT(refused, 2 * kCases);
}

TEST(LayerRules, WhatAWishHasBecomeIsNeverRefusedByAPlan) {
  Draw draw(2);
  int refused = 0;
  for (int i = 0; i < kCases; ++i) {
    const LayerFacts facts = draw.facts();
    const LayerWishes wishes = draw.wishes();
    const Options options = draw.options();
    const auto layer = wished_layer(facts, wishes, options);
    if (!layer.ok()) {
      EXPECT_TRUE(layer.status().message().starts_with("parameter w ")) << layer.status().message();
      ++refused;
      continue;
    }
    const Layer& given = layer.value();
    const auto terms = layer_terms(given, draw.cluster(2), options);
    ASSERT_TRUE(terms.ok()) << terms.status().message();
    EXPECT_EQ(given.stored, facts.stored);
    if (!facts.gives_factors) {
      EXPECT_FALSE(given.factorable());
    }
    if (ranks_drift(options)) {
      EXPECT_EQ(terms.value().schemes.list(), std::vector{Scheme::ps});
    }
    const bool counts = facts.gives_rows == RowGradient::sparse && !given.row_gradient;
    EXPECT_EQ(given.element_count, facts.element_count + (counts ? facts.rows + 1 : 0));
  }
  EXPECT_GT(refused, kCases / 8);
  EXPECT_LT(refused, kCases / 2 + kCases / 4);
}

Layer weight(Scheme scheme) { return {"fc", DType::float32, 400 * 400, 400, 400, scheme}; }

std::string refusal(const Layer& layer, const Options& options) {
  return layer_terms(layer, {4, 4, Placement::colocated}, options).status().message();
}

TEST(LayerRules, RanksAtDifferentStepsWaitForNobody) {
  for (const char* option : {"stragglers=drop", "consistency=ssp", "consistency=async"}) {
    Options options;
    if (option == std::string("stragglers=drop"))
      options.stragglers = Stragglers::drop;
    else
      options.consistency = option == std::string("consistency=ssp") ? Consistency::ssp : Consistency::async;
    EXPECT_EQ(refusal(weight(Scheme::sfb), options),
              std::string("layer \"fc\" has scheme sfb, in which every worker waits for all others, late workers too; "
                          "use auto or ps with ") +
                  option);
    Layer rounded = weight(Scheme::automatic);
    rounded.wire = WireFormat::int8;
    rounded.compression.error_feedback = true;
    EXPECT_TRUE(refusal(rounded, options).find(std::string("error_feedback, which ") + option) != std::string::npos);
    const auto terms = layer_terms(weight(Scheme::automatic), {4, 4, Placement::colocated}, options);
    EXPECT_EQ(terms.value().scheme, Scheme::ps);
    EXPECT_EQ(terms.value().reason, std::string(option) + ": servers complete the steps");
  }
}

TEST(LayerRules, SayWhyASchemeIsSettled) {
  const auto reason = [](Layer layer) {
    return std::string(layer_terms(std::move(layer), {4, 4, Placement::colocated}, {}).value().reason);
  };
  EXPECT_EQ(reason(weight(Scheme::automatic)), "") << "each step's factors decide";
  EXPECT_EQ(reason(weight(Scheme::sfb)), "chosen by the user");
  EXPECT_EQ(reason({"bias", DType::float32, 9, 0, 0, Scheme::topk}), "too small for topk, or no matrix");
  EXPECT_EQ(reason({"bias", DType::float32, 9, 0, 0, Scheme::ps}), "its gradient is no sum of factors");
  EXPECT_EQ(reason({"fc", DType::float32, 12, 3, 4, Scheme::automatic}), "so small that it travels with others");
  Layer stored = weight(Scheme::automatic);
  stored.stored = true;
  EXPECT_EQ(reason(stored), "updated by the servers");
}

TEST(LayerRules, ASchemeForGoodNeedsFactorsOnAllRanks) {
  const Cluster cluster{4, 4, Placement::colocated};
  const auto settled = [&](std::vector<std::int64_t> counts, const Options& options = {}) {
    return settled_scheme(weight(Scheme::automatic), counts, cluster, options);
  };
  EXPECT_EQ(settled({8, 8, 8, 8}), Scheme::sfb);
  EXPECT_EQ(settled({8, 8, 8, -1}), Scheme::ps);
  EXPECT_EQ(settled({8, 0, 8, 8}), Scheme::ps);
  EXPECT_EQ(settled({4000, 4000, 4000, 4000}), Scheme::ps);
  Options grouped;
  grouped.small_bytes = std::size_t{400} * 400 * 4;
  EXPECT_EQ(settled({8, 8, 8, 8}, grouped), Scheme::ps);
}

}  // namespace
}  // namespace poseidon
