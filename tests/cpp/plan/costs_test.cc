#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "poseidon/plan.h"

namespace poseidon {
namespace {

Layer matrix(std::size_t rows, std::size_t cols, Scheme scheme = Scheme::automatic) {
  return {"fc.weight", DType::float32, rows * cols, rows, cols, scheme};
}

SchemeCost cost_of(Scheme scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  return traits_of(scheme).cost(rows, cols, factor_count, cluster);
}

double busiest(Scheme scheme, std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  return cost_of(scheme, rows, cols, factor_count, cluster).busiest(cluster);
}

TEST(Costs, GoldenValuesOfTable1) {
  const Cluster cluster{8, 8, Placement::colocated};
  const SchemeCost ps = cost_of(Scheme::ps, 4096, 4096, 32, cluster);
  EXPECT_DOUBLE_EQ(ps.worker, 33554432);                                     // 33.55 M
  EXPECT_DOUBLE_EQ(ps.server, 33554432);                                     // 33.55 M
  EXPECT_DOUBLE_EQ(ps.server_and_worker, 58720256);                          // 58.72 M
  EXPECT_DOUBLE_EQ(busiest(Scheme::sfb, 4096, 4096, 32, cluster), 3670016);  // 3.67 M
  EXPECT_DOUBLE_EQ(ps.busiest(cluster), ps.server_and_worker);
}

TEST(Costs, PlacementDecidesWhichNodeIsTheBusiest) {
  const Cluster dedicated{8, 2, Placement::dedicated};
  const SchemeCost few_servers = cost_of(Scheme::ps, 100, 200, 1, dedicated);
  EXPECT_DOUBLE_EQ(few_servers.worker, 40000);
  EXPECT_DOUBLE_EQ(few_servers.server, 160000);
  EXPECT_DOUBLE_EQ(few_servers.busiest(dedicated), 160000);
  EXPECT_DOUBLE_EQ(busiest(Scheme::ps, 100, 200, 1, {2, 8, Placement::dedicated}), 40000);
}

TEST(Costs, ProjectAdam) {
  const Cluster dedicated{8, 8, Placement::dedicated};
  const SchemeCost cost = cost_of(Scheme::project_adam, 100, 200, 4, dedicated);
  EXPECT_DOUBLE_EQ(cost.server, 8 * 20000 + 8 * 4 * 300);
  EXPECT_DOUBLE_EQ(cost.worker, 4 * 300 + 20000);
  EXPECT_DOUBLE_EQ(cost.busiest(dedicated), cost.server);
  EXPECT_DOUBLE_EQ(busiest(Scheme::project_adam, 100, 200, 4, {8, 8, Placement::colocated}), 7 * (20000 + 4 * 300));
}

TEST(Costs, ShardedFactors) {
  // A pair of worker and server: K · (M / P₂ + N) numbers there, and M · N / P₂ back.
  constexpr double pair = 4 * (200.0 / 8 + 100) + 200.0 * 100 / 8;
  for (const auto& [rows, cols] : {std::pair(200, 100), std::pair(100, 200)}) {
    const auto cost_in = [&, m = std::size_t(rows), n = std::size_t(cols)](const Cluster& cluster) {
      return cost_of(Scheme::sharded_factors, m, n, 4, cluster);
    };
    EXPECT_DOUBLE_EQ(cost_in({16, 8, Placement::dedicated}).worker, 8 * pair);
    EXPECT_DOUBLE_EQ(cost_in({16, 8, Placement::dedicated}).server, 16 * pair);
    EXPECT_DOUBLE_EQ(cost_in({8, 8, Placement::colocated}).server_and_worker, 14 * pair);
  }
  const double blocks_are_rows = cost_of(Scheme::sharded_factors, 3, 2, 1, {9, 9, Placement::dedicated}).worker;
  EXPECT_DOUBLE_EQ(blocks_are_rows, 3 * (1 * (1 + 2) + 2)) << "no server has less than a row";
}

TEST(Costs, OneColocatedWorkerMovesNothing) {
  for (const Scheme scheme : all_schemes())
    EXPECT_DOUBLE_EQ(busiest(scheme, 100, 200, 4, {1, 1, Placement::colocated}), 0) << scheme_name(scheme);
}

TEST(BestScheme, PapersExamples) {
  EXPECT_EQ(best_scheme(matrix(4096, 4096), 32, {8, 8, Placement::colocated}), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(1000, 1024), 128, {16, 16, Placement::colocated}), Scheme::ps);  // GoogLeNet
}

TEST(BestScheme, ColocatedThresholdIsFactorCountTimesWorkers) {
  const Cluster cluster{8, 8, Placement::colocated};  // H = 2MN/(M+N) = 4096 = K·P at K = 512
  EXPECT_EQ(best_scheme(matrix(4096, 4096), 512, cluster), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(4096, 4096), 513, cluster), Scheme::ps);
}

TEST(BestScheme, CountsTheBytesOfBothFormats) {
  const Cluster cluster{2, 2, Placement::colocated};
  Layer layer = matrix(1024, 1024);
  const auto limit = [&] {  // the largest K with which factors are sent
    double count = 1;
    while (best_scheme(layer, count + 1, cluster) != Scheme::ps) ++count;
    return count;
  };
  EXPECT_EQ(limit(), 512);  // 2 K (M + N) <= 2 MN
  layer.wire = WireFormat::bf16;
  EXPECT_EQ(limit(), 512);
  layer.compression.factor_wire = WireFormat::fp32;
  EXPECT_EQ(limit(), 256);
  layer.wire = WireFormat::fp32;
  layer.compression.factor_wire = WireFormat::bf16;
  EXPECT_EQ(limit(), 1024);
  layer.wire = WireFormat::int8;
  layer.compression.factor_wire.reset();
  EXPECT_EQ(limit(), 260);  // 260 bytes of 256 dense values, and 2 of a factor
}

TEST(BestScheme, DedicatedComparesWithTheBusiestNode) {
  // M = N = 1024, 4 workers: sfb = 12288 K; ps_worker = 2 M floats, ps_server = 8 M / P₂.
  EXPECT_EQ(best_scheme(matrix(1024, 1024), 170, {4, 4, Placement::dedicated}), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(1024, 1024), 171, {4, 4, Placement::dedicated}), Scheme::ps);
  EXPECT_EQ(best_scheme(matrix(1024, 1024), 682, {4, 1, Placement::dedicated}), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(1024, 1024), 683, {4, 1, Placement::dedicated}), Scheme::ps);
}

TEST(BestScheme, ShardedFactorsWhereKTimesPIsLargeAndTheMatrixIsLong) {
  const Cluster cluster{16, 16, Placement::colocated};
  EXPECT_EQ(best_scheme(matrix(4096, 25088), 512, cluster), Scheme::sharded_factors);  // VGG's fc6
  EXPECT_EQ(best_scheme(matrix(25088, 4096), 512, cluster), Scheme::sharded_factors);
  EXPECT_EQ(best_scheme(matrix(32000, 1024), 256, cluster), Scheme::sharded_factors);  // a classifier's head
  EXPECT_EQ(best_scheme(matrix(4096, 25088), 32, cluster), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(4096, 25088), 4096, cluster), Scheme::ps);
  // At K = H / P a square layer costs the same with ps and sfb, and more with sharded factors.
  for (const double factor_count : {128.0, 255.0, 256.0, 257.0, 512.0})
    EXPECT_NE(best_scheme(matrix(4096, 4096), factor_count, cluster), Scheme::sharded_factors);
}

TEST(BestScheme, DedicatedServersNeverGetShardedFactorsUnasked) {
  // Pushes and results of ps use both directions of a port at once. Here they follow one another.
  for (const int servers : {2, 8, 16, 32})
    for (const double factor_count : {16.0, 64.0, 128.0, 256.0, 512.0})
      for (const auto& layer : {matrix(4096, 25088), matrix(1024, 1024), matrix(32000, 1024)})
        EXPECT_NE(best_scheme(layer, factor_count, {16, servers, Placement::dedicated}), Scheme::sharded_factors);
  EXPECT_EQ(best_scheme(matrix(8, 8, Scheme::sharded_factors), 1000, {4, 4, Placement::dedicated}),
            Scheme::sharded_factors);
}

TEST(BestScheme, CasesThatCostsDoNotDecide) {
  const Cluster cluster{4, 4, Placement::colocated};
  EXPECT_EQ(best_scheme(matrix(4096, 4096), 0, cluster), Scheme::ps) << "unknown factor count";
  EXPECT_EQ(best_scheme(matrix(4096, 4096), 1, {1, 1, Placement::colocated}), Scheme::local);
  EXPECT_EQ(best_scheme(matrix(4096, 4096, Scheme::ps), 1, cluster), Scheme::ps);
  EXPECT_EQ(best_scheme(matrix(8, 8, Scheme::sfb), 1000, cluster), Scheme::sfb);
  EXPECT_EQ(best_scheme(matrix(8, 8, Scheme::project_adam), 1000, cluster), Scheme::project_adam);
  EXPECT_EQ(best_scheme({"bias", DType::float32, 8, 0, 0, Scheme::sfb}, 1, cluster), Scheme::ps);
  EXPECT_EQ(best_scheme({"steps", DType::int64, 4096 * 4096, 4096, 4096, Scheme::sfb}, 1, cluster), Scheme::ps);
}

TEST(BestScheme, AChoiceHoldsFromHalfToTwiceItsFactorCount) {
  const Cluster cluster{8, 8, Placement::colocated};  // the costs are equal at K = 512
  const Layer layer = matrix(4096, 4096);
  const SchemeChoice ps{Scheme::ps, 100};
  for (const double holds : {50.0, 100.0, 200.0})
    EXPECT_EQ(best_scheme(layer, holds, cluster, ps), Scheme::ps) << "K " << holds;
  for (const double holds_not : {49.0, 201.0})
    EXPECT_EQ(best_scheme(layer, holds_not, cluster, ps), Scheme::sfb) << "K " << holds_not;
  EXPECT_EQ(best_scheme(layer, 1000, cluster, {Scheme::sfb, 1000}), Scheme::sfb);
  EXPECT_EQ(best_scheme(layer, 0, cluster, {Scheme::sfb, 0}), Scheme::ps) << "unknown factor count";
  EXPECT_EQ(best_scheme(layer, 100, cluster, {Scheme::automatic, 100}), Scheme::sfb) << "nothing was chosen";
  EXPECT_EQ(best_scheme(matrix(4096, 4096, Scheme::ps), 100, cluster, {Scheme::sfb, 100}), Scheme::ps);
  EXPECT_EQ(best_scheme(layer, 100, {1, 1, Placement::colocated}, {Scheme::sfb, 100}), Scheme::local);
}

TEST(BestScheme, RowsWhoseAbsenceMeansZerosTravelAsRowsWhileTheyAreFewer) {
  const Cluster cluster{8, 8, Placement::colocated};
  Layer table = matrix(1000, 9);
  table.row_gradient = table.zeros_are_missing = true;
  EXPECT_EQ(best_scheme(table, 0, cluster), Scheme::ps) << "unknown row count";
  // rows: 2 · 7 · K · 10 numbers; ps: 4 · 9000 · 7/8.
  EXPECT_EQ(best_scheme(table, 224, cluster), Scheme::rows);
  EXPECT_EQ(best_scheme(table, 226, cluster), Scheme::ps);
  EXPECT_EQ(best_scheme(table, 10, {1, 1, Placement::colocated}), Scheme::local);
  table.zeros_are_missing = false;  // the result has to say which rows some worker has
  for (const double row_count : {0.0, 10.0, 1000.0}) EXPECT_EQ(best_scheme(table, row_count, cluster), Scheme::rows);
  table.zeros_are_missing = true;
  table.scheme = Scheme::rows;
  EXPECT_EQ(best_scheme(table, 1000, cluster), Scheme::rows);
}

TEST(AutomaticSchemes, AreThoseThatCostsDecideAmong) {
  const Cluster cluster{4, 4, Placement::colocated};
  const std::vector<Scheme> schemes = automatic_schemes(matrix(64, 64), cluster);
  for (const Scheme scheme : all_schemes()) {
    const SchemeTraits& traits = traits_of(scheme);
    EXPECT_EQ(std::ranges::count(schemes, scheme), traits.automatic && !traits.takes_rows) << scheme_name(scheme);
  }
  EXPECT_GE(schemes.size(), 2U);
  for (const Scheme scheme : automatic_schemes(matrix(64, 64), {4, 4, Placement::dedicated}))
    EXPECT_FALSE(traits_of(scheme).one_way_at_a_time) << scheme_name(scheme);
  Layer stored = matrix(64, 64);
  stored.stored = true;
  Layer rows = matrix(64, 64);
  rows.row_gradient = true;
  for (const Layer& fixed : {matrix(64, 64, Scheme::sfb), stored, rows, Layer{"bias", DType::float32, 64},
                             Layer{"steps", DType::int64, 64, 8, 8}})
    EXPECT_TRUE(automatic_schemes(fixed, cluster).empty()) << fixed.name;
  EXPECT_TRUE(automatic_schemes(matrix(64, 64), {1, 1, Placement::colocated}).empty());
}

TEST(Costs, FactorsOfAllAreMultipliedByAllOrByTheServers) {
  const Cluster cluster{8, 8, Placement::colocated};
  EXPECT_DOUBLE_EQ(traits_of(Scheme::sfb).multiply_adds(100, 200, 4, cluster), 8.0 * 4 * 100 * 200);
  EXPECT_DOUBLE_EQ(traits_of(Scheme::project_adam).multiply_adds(100, 200, 4, cluster), 8.0 * 4 * 100 * 200);
  EXPECT_DOUBLE_EQ(traits_of(Scheme::sharded_factors).multiply_adds(100, 200, 4, cluster), 4.0 * 100 * 200);
  EXPECT_DOUBLE_EQ(traits_of(Scheme::sharded_factors).multiply_adds(2, 3, 4, {8, 8, Placement::dedicated}),
                   8 * 4 * 2.0);
  EXPECT_EQ(traits_of(Scheme::ps).multiply_adds, nullptr);
}

TEST(SchemeName, RoundTrip) {
  for (const Scheme scheme :
       {Scheme::automatic, Scheme::ps, Scheme::sfb, Scheme::sharded_factors, Scheme::project_adam, Scheme::local}) {
    const Result<Scheme> parsed = parse_scheme(scheme_name(scheme));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed.value(), scheme);
  }
  EXPECT_EQ(scheme_name(Scheme::automatic), "auto");
  const Result<Scheme> unknown = parse_scheme("rings");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), ErrorCode::invalid_argument);
  EXPECT_NE(unknown.status().message().find("\"rings\""), std::string::npos);
  EXPECT_NE(unknown.status().message().find("known: auto, ps"), std::string::npos);
}

}  // namespace
}  // namespace poseidon
