// How a plan spreads each server's chunks over the cores and flows that lead there.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "poseidon/plan.h"

namespace poseidon {
namespace {

using Random = std::mt19937;

std::size_t below(Random& random, std::size_t bound) { return std::size_t{random()} % bound; }

std::vector<Layer> random_layers(Random& random, std::size_t most_layers) {
  std::vector<Layer> layers;
  const std::size_t count = 1 + below(random, most_layers);
  for (std::size_t i = 0; i < count; ++i) {
    Layer layer;
    layer.name = "layer " + std::to_string(i);
    layer.element_count = 1 + below(random, below(random, 4) == 0 ? 2'000'000 : 50'000);
    layer.stored = below(random, 4) == 0;
    layer.whole = layer.stored && below(random, 2) == 0;
    layers.push_back(layer);
  }
  return layers;
}

Cluster random_cluster(Random& random) {
  Cluster cluster;
  cluster.worker_count = static_cast<int>(1 + below(random, 6));
  if (below(random, 2) == 0) {
    cluster.placement = Placement::dedicated;
    cluster.server_count = static_cast<int>(1 + below(random, 4));
  } else {
    cluster.server_count = cluster.worker_count;
  }
  cluster.flow_count = static_cast<int>(1 + below(random, 3));
  if (below(random, 4) == 0) return cluster;  // then one core each
  for (int server = 0; server < cluster.server_count; ++server)
    cluster.core_counts.push_back(static_cast<int>(1 + below(random, 5)));
  return cluster;
}

Options random_options(Random& random) {
  Options options;
  options.chunk_bytes = std::size_t{4096} << below(random, 10);
  options.small_bytes = below(random, 2) == 0 ? 0 : 32u << 10;
  options.partition = below(random, 5) == 0 ? Partition::coarse : Partition::balanced;
  return options;
}

Plan plan_with_lanes(const std::vector<Layer>& layers, const Cluster& cluster, const Options& options) {
  auto plan = make_plan(layers, cluster, options, 0);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? plan.value() : Plan{};
}

/// The sizes on every lane of every server.
std::vector<std::vector<std::vector<std::size_t>>> lanes_of(const Plan& plan) {
  std::vector<std::vector<std::vector<std::size_t>>> servers;
  for (int server = 0; server < plan.cluster.server_count; ++server)
    servers.emplace_back(static_cast<std::size_t>(plan.cluster.core_count(server) * plan.cluster.flow_count));
  for (const Unit& unit : plan.units) {
    for (const Chunk& chunk : unit.chunks) {
      EXPECT_GE(chunk.core, 0);
      EXPECT_LT(chunk.core, plan.cluster.core_count(chunk.server));
      EXPECT_GE(chunk.flow, 0);
      EXPECT_LT(chunk.flow, plan.cluster.flow_count);
      const auto lane = static_cast<std::size_t>(chunk.core * plan.cluster.flow_count + chunk.flow);
      servers[static_cast<std::size_t>(chunk.server)].at(lane).push_back(chunk.size_bytes);
    }
  }
  return servers;
}

std::size_t sum_of(const std::vector<std::size_t>& sizes) {
  std::size_t sum = 0;
  for (const auto size : sizes) sum += size;
  return sum;
}

/// Returns the least possible load of the fullest of `lane_count` lanes. It tries every assignment.
std::size_t best_load(std::vector<std::size_t> sizes, std::size_t lane_count) {
  std::sort(sizes.rbegin(), sizes.rend());
  std::vector<std::size_t> loads(lane_count, 0);
  std::size_t best = sum_of(sizes);
  const std::function<void(std::size_t)> place = [&](std::size_t next) {
    const std::size_t fullest = *std::max_element(loads.begin(), loads.end());
    if (fullest >= best) return;
    if (next == sizes.size()) {
      best = fullest;
      return;
    }
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
      if (lane > 0 && loads[lane] == loads[lane - 1]) continue;  // lanes are alike
      loads[lane] += sizes[next];
      place(next + 1);
      loads[lane] -= sizes[next];
    }
  };
  place(0);
  return best;
}

/// Graham 1969: the largest first, each to the least loaded. Then no lane without its smallest chunk is
/// fuller than any other, and the fullest is at most 4/3 of the best.
void expect_graham(const std::vector<std::vector<std::size_t>>& lanes) {
  std::vector<std::size_t> loads;
  std::vector<std::size_t> sizes;
  for (const auto& lane : lanes) {
    loads.push_back(sum_of(lane));
    sizes.insert(sizes.end(), lane.begin(), lane.end());
  }
  if (sizes.empty()) return;
  const std::size_t fullest = *std::max_element(loads.begin(), loads.end());
  const std::size_t emptiest = *std::min_element(loads.begin(), loads.end());
  for (std::size_t i = 0; i < lanes.size(); ++i)
    if (!lanes[i].empty()) EXPECT_LE(loads[i] - *std::min_element(lanes[i].begin(), lanes[i].end()), emptiest);
  const double mean = static_cast<double>(sum_of(loads)) / static_cast<double>(lanes.size());
  const std::size_t largest = *std::max_element(sizes.begin(), sizes.end());
  if (3.0 * static_cast<double>(largest) <= mean) EXPECT_LE(static_cast<double>(fullest), mean * 4 / 3);
  if (sizes.size() <= 10) EXPECT_LE(3 * fullest, 4 * best_load(sizes, lanes.size()));
}

TEST(Lanes, EveryServersChunksAreSpreadWithinGrahamsBound) {
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto layers = random_layers(random, round % 2 == 0 ? 5 : 60);
    const Cluster cluster = random_cluster(random);
    const Plan plan = plan_with_lanes(layers, cluster, random_options(random));
    for (const auto& lanes : lanes_of(plan)) expect_graham(lanes);
    if (HasFailure()) return;
  }
}

TEST(Lanes, AreTheSameOnEveryRank) {
  Random random(8);
  for (int round = 0; round < 50; ++round) {
    const auto layers = random_layers(random, 30);
    const Cluster cluster = random_cluster(random);
    const Options options = random_options(random);
    const Plan plan = plan_with_lanes(layers, cluster, options);
    const Plan again = plan_with_lanes(layers, cluster, options);
    EXPECT_EQ(plan_lines(plan), plan_lines(again));
    EXPECT_EQ(lanes_of(plan), lanes_of(again));
  }
}

TEST(Lanes, ShowInThePlansText) {
  const std::vector<Layer> layers{{"a", DType::float32, 1'000'000, 0, 0, Scheme::ps}};
  Cluster cluster{2, 2, Placement::colocated, {}, 1};
  std::vector<std::vector<std::string>> texts;
  for (const auto& counts : {std::vector<int>{}, {2, 2}, {2, 3}, {3, 2}}) {
    for (const int flows : {1, 2}) {
      cluster.core_counts = counts;
      cluster.flow_count = flows;
      texts.push_back(plan_lines(plan_with_lanes(layers, cluster, {})));
    }
  }
  for (std::size_t i = 0; i < texts.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(texts[i], texts[j]) << i << " and " << j;
}

TEST(Lanes, NeighboursAreOnDifferentCores) {
  Options options;
  options.chunk_bytes = 64u << 10;
  const std::vector<Layer> layers{{"a", DType::float32, 4 * (64u << 10) / 4, 0, 0, Scheme::ps}};
  const Plan plan = plan_with_lanes(layers, {1, 1, Placement::colocated, {2}, 2}, options);
  ASSERT_EQ(plan.units[0].chunks.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(plan.units[0].chunks[i].core, static_cast<int>(i % 2));
    EXPECT_EQ(plan.units[0].chunks[i].flow, static_cast<int>(i / 2));
  }
}

TEST(Lanes, AWholeLayerIsOneChunkAndStoredLayersAreNoGroup) {
  std::vector<Layer> layers(3);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].name = std::to_string(i);
    layers[i].element_count = i == 0 ? 3'000'000 : 10;
    layers[i].stored = i < 2;
    layers[i].whole = i == 0;
  }
  const Plan plan = plan_with_lanes(layers, {4, 4, Placement::colocated, {2, 1, 2, 1}, 2}, {});
  EXPECT_EQ(plan.units[plan.unit_of_layer[0]].chunks.size(), 1u);
  for (const Unit& unit : plan.units) EXPECT_FALSE(unit.grouped());
  EXPECT_EQ(plan.layers[0].scheme, Scheme::ps);
}

TEST(Lanes, ClustersWithoutCoresOrFlowsAreRefused) {
  for (const Cluster& cluster :
       {Cluster{2, 2, Placement::colocated, {1}, 1}, Cluster{2, 2, Placement::colocated, {1, 0}, 1},
        Cluster{2, 2, Placement::colocated, {}, 0}})
    EXPECT_EQ(make_plan({}, cluster, {}, 0).status().code(), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace poseidon
