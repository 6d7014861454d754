// Priorities, end to end: the connection of each message, the order of sending, and priorities that are refused.
#include "plan/priority.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/client/tap.h"
#include "poseidon/server.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kElements = 1000;

Status set(Client& client, std::uint32_t first_layer, const std::vector<LayerPriority>& priorities,
           double threshold = 0.5) {
  return client.set_priorities(first_layer, priorities, threshold);
}

TEST(SetPriorities, RefusesWhatCannotBe) {
  auto all = cluster_options(1);
  all[0].priority_classes = 3;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  Client& client = *cluster.clients[0];
  const auto first = cluster.add({vector_layer("a", 10), vector_layer("b", 10)});
  const auto expect_invalid = [](const Status& status, const std::string& word) {
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(status, word)) << status.message();
  };
  for (const double urgency : {-0.001, 1.001, kNotANumber, std::numeric_limits<double>::infinity()})
    expect_invalid(set(client, first, {{urgency, -1}}), "urgency");
  for (const int priority_class : {-2, 3, 100}) expect_invalid(set(client, first, {{0.5, priority_class}}), "below 3");
  for (const double threshold : {-0.1, 1.1, kNotANumber})
    expect_invalid(set(client, first, {{0.5, -1}}, threshold), "threshold");
  expect_invalid(set(client, first, {{1, 0}, {1, 0}, {1, 0}}), "no layer " + std::to_string(first + 2));
  expect_invalid(set(client, first + 2, {{1, 0}}), "no layer " + std::to_string(first + 2));
  expect_invalid(set(client, 0xffffffffu, {{1, 0}}), "no layer 4294967295");
  EXPECT_TRUE(set(client, first, {}).ok());
  EXPECT_TRUE(set(client, first + 2, {}).ok()) << "none after the last one";
  EXPECT_TRUE(set(client, first, {{0, 2}, {1, -1}}, 1).ok());
}

TEST(Done, IsWhetherNothingRuns) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("a", kElements)});
  Client& client = *cluster.clients[0];
  std::vector<float> mine(kElements, 1.0F);
  std::vector<float> others(kElements, 2.0F);
  EXPECT_TRUE(client.done(layer));
  EXPECT_TRUE(client.done(layer + 1)) << "there is none";
  ASSERT_TRUE(client.start(layer, bytes_of(mine), 1).ok());
  EXPECT_FALSE(client.done(layer)) << "the other rank has not pushed";
  ASSERT_TRUE(cluster.clients[1]->start(layer, bytes_of(others), 1).ok());
  ASSERT_TRUE(client.wait(layer, always).ok());
  EXPECT_TRUE(client.done(layer));
  ASSERT_TRUE(cluster.clients[1]->wait(layer, always).ok());
  ASSERT_TRUE(client.start(layer, bytes_of(mine), 1).ok());
  client.abort("enough");
  EXPECT_EQ(client.wait(layer, always).code(), ErrorCode::aborted);
  EXPECT_TRUE(client.done(layer)) << "a failure ends it, too";
}

/// Ranks whose connections to a dedicated server lead through a tap.
class TappedCluster {
 public:
  TappedCluster(int world_size, Options shared) {
    auto all = cluster_options(world_size);
    for (Options& options : all) {
      options = with_place_of(options, shared);
      options.transport = Medium::tcp;
      options.servers = {tap.address()};
    }
    cluster = std::make_unique<TestCluster>(all);
  }

  /// Adds the same layers on all ranks. Keeps the units' ids by layer.
  void add(const std::vector<Layer>& layers, bool transient = false) {
    cluster->each([&](std::size_t rank, Client& client) {
      auto added = client.add_layers(layers, transient, always);
      ASSERT_TRUE(added.ok()) << added.status().message();
      if (rank != 0) return;
      const Plan& plan = added.value().plan;
      first = added.value().first_layer;
      units.clear();
      for (const std::size_t unit : plan.unit_of_layer) units.push_back(plan.units[unit].id);
    });
    layer_count = layers.size();
  }

  void set_all(const std::vector<LayerPriority>& priorities, double threshold) {
    for (auto& client : cluster->clients) EXPECT_TRUE(set(*client, first, priorities, threshold).ok());
  }

  /// All ranks push kElements ones for every layer and receive the sum.
  void step() {
    cluster->each([&](std::size_t, Client& client) {
      std::vector<std::vector<float>> gradients(layer_count, std::vector<float>(kElements, 1.0F));
      for (std::size_t i = 0; i < layer_count; ++i)
        EXPECT_TRUE(client.start(first + static_cast<std::uint32_t>(i), bytes_of(gradients[i]), 1).ok());
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << status.message();
      const auto sum = static_cast<float>(cluster->clients.size());
      for (const auto& gradient : gradients) EXPECT_EQ(gradient, std::vector<float>(kElements, sum));
    });
  }

  /// Returns the classes of the connections that carried such messages, and the levels of these messages.
  std::set<std::pair<std::uint32_t, std::uint16_t>> ways(wire::Kind kind, std::size_t layer,
                                                         std::uint64_t step_number) const {
    std::set<std::pair<std::uint32_t, std::uint16_t>> found;
    for (const Tap::Seen& one : tap.seen())
      if (one.header.kind == kind && one.header.unit == units[layer] && one.header.step == step_number)
        found.emplace(one.priority_class, one.header.priority);
    return found;
  }

  /// Returns the number of such messages.
  std::size_t count(wire::Kind kind, std::size_t layer, std::uint64_t step_number) const {
    const auto seen = tap.seen();
    return static_cast<std::size_t>(std::ranges::count_if(seen, [&](const Tap::Seen& one) {
      return one.header.kind == kind && one.header.unit == units[layer] && one.header.step == step_number;
    }));
  }

  /// Checks that a layer's pushes and results of a step used only the connections of this class, with this level.
  void expect_way(std::size_t layer, std::uint64_t step_number, std::uint32_t priority_class, double urgency) const {
    const std::set<std::pair<std::uint32_t, std::uint16_t>> expected{{priority_class, level_of(urgency)}};
    EXPECT_EQ(ways(wire::Kind::push, layer, step_number), expected) << "layer " << layer << ", step " << step_number;
    EXPECT_EQ(ways(wire::Kind::result, layer, step_number), expected) << "layer " << layer << ", step " << step_number;
  }

  static std::unique_ptr<Server> listen() {
    Options options;
    options.interfaces = {"127.0.0.1"};
    return std::move(Server::listen(options, 0).value());
  }

  const std::unique_ptr<Server> server = listen();
  Tap tap{server->address()};
  std::unique_ptr<TestCluster> cluster;
  std::uint32_t first = 0;
  std::size_t layer_count = 0;
  std::vector<std::uint32_t> units;  // ids, by layer
};

/// Nothing is grouped, and every layer has several chunks.
Options separate_layers(int priority_classes) {
  Options options;
  options.small_bytes = 0;
  options.chunk_bytes = 1024;
  options.priority_classes = priority_classes;
  return options;
}

std::vector<Layer> layers_of(std::size_t count) {
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < count; ++i) layers.push_back(vector_layer(std::to_string(i), kElements));
  return layers;
}

TEST(Priorities, PushesAndResultsTakeTheConnectionOfTheirClass) {
  Options options = separate_layers(2);
  options.flows = 2;
  TappedCluster tapped(2, options);
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(3));
  tapped.set_all({{1, -1}, {0.7, -1}, {0.3, -1}}, 0.5);
  tapped.step();
  tapped.expect_way(0, 1, 0, 1);
  tapped.expect_way(1, 1, 0, 0.7);
  tapped.expect_way(2, 1, 1, 0.3);
  // A result comes back where its push went, and both flows of a class are used.
  using Place = std::tuple<std::size_t, std::uint32_t, std::uint32_t, std::uint64_t>;
  std::set<Place> pushes;
  std::set<Place> results;
  std::set<std::pair<std::uint32_t, std::uint32_t>> flows;
  for (const Tap::Seen& one : tapped.tap.seen()) {
    const Place place{one.connection, one.header.unit, one.header.chunk, one.header.step};
    if (one.header.kind == wire::Kind::push) pushes.insert(place);
    if (one.header.kind == wire::Kind::result) results.insert(place);
    if (one.header.kind == wire::Kind::push) flows.emplace(one.flow, one.priority_class);
  }
  EXPECT_EQ(pushes, results);
  EXPECT_EQ(flows.size(), 4u);
}

TEST(Priorities, ChangeFromTheNextStepOn) {
  TappedCluster tapped(2, separate_layers(3));
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(2));
  tapped.step();
  for (const std::size_t layer : {0u, 1u}) tapped.expect_way(layer, 1, 2, 0);  // nobody has set any
  tapped.set_all({{1, -1}, {0.6, -1}}, 0.2);
  tapped.step();
  tapped.expect_way(0, 2, 0, 1);
  tapped.expect_way(1, 2, 1, 0.6);
  tapped.set_all({{0.25, 0}, {1, 2}}, 0.2);  // classes that are named
  tapped.step();
  tapped.expect_way(0, 3, 0, 0.25);
  tapped.expect_way(1, 3, 2, 1);
  EXPECT_FALSE(set(*tapped.cluster->clients[0], tapped.first, {{1, 1}, {2, 1}}).ok());
  tapped.step();
  tapped.expect_way(0, 4, 0, 0.25);  // an error changes nothing
  tapped.expect_way(1, 4, 2, 1);
}

TEST(Priorities, MayDifferBetweenRanks) {
  TappedCluster tapped(2, separate_layers(2));
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(1));
  ASSERT_TRUE(set(*tapped.cluster->clients[0], tapped.first, {{1, 0}}).ok());
  ASSERT_TRUE(set(*tapped.cluster->clients[1], tapped.first, {{0, 1}}).ok());
  tapped.step();
  std::map<std::uint32_t, std::set<std::pair<std::uint32_t, std::uint16_t>>> by_rank;
  for (const Tap::Seen& one : tapped.tap.seen())
    if (one.header.unit == tapped.units[0] && one.header.kind == wire::Kind::result)
      by_rank[one.rank].emplace(one.priority_class, one.header.priority);
  EXPECT_EQ(by_rank[0], (std::set<std::pair<std::uint32_t, std::uint16_t>>{{0, level_of(1)}}));
  EXPECT_EQ(by_rank[1], (std::set<std::pair<std::uint32_t, std::uint16_t>>{{1, level_of(0)}}));
}

TEST(Priorities, AGroupIsAsUrgentAsItsMostUrgentMember) {
  Options options;
  options.priority_classes = 2;
  TappedCluster tapped(2, options);
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(4));
  ASSERT_EQ(std::set(tapped.units.begin(), tapped.units.end()).size(), 1u) << "they are no group";
  tapped.set_all({{0.1, -1}, {0.9, -1}, {0.5, 1}, {0, 1}}, 0.8);
  tapped.step();
  tapped.expect_way(0, 1, 0, 0.9);
}

TEST(Priorities, TransientLayersOvertakeAllOthers) {
  TappedCluster tapped(2, separate_layers(2));
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(1), true);
  tapped.step();
  tapped.expect_way(0, 1, 0, 1);
}

TEST(Priorities, WhatFollowsAnAssignTakesItsConnection) {
  TappedCluster tapped(2, separate_layers(2));
  ASSERT_TRUE(tapped.cluster->connected());
  Layer layer = vector_layer("stored", kElements);
  layer.stored = true;
  tapped.add({layer});
  std::vector<float> values(kElements, 5.0F);
  std::vector<float> got(kElements);
  Client& client = *tapped.cluster->clients[0];
  tapped.set_all({{0.2, 1}}, 0.5);
  ASSERT_TRUE(client.assign(tapped.first, bytes_of(values)).ok());
  ASSERT_TRUE(client.wait_all(always).ok());
  tapped.set_all({{1, 0}}, 0.5);
  ASSERT_TRUE(client.pull(tapped.first, bytes_of(got)).ok());
  ASSERT_TRUE(client.wait_all(always).ok());
  EXPECT_EQ(got, values) << "a pull on another connection may come before the assignment";
  const std::set<std::pair<std::uint32_t, std::uint16_t>> old{{1, level_of(0.2)}};
  EXPECT_EQ(tapped.ways(wire::Kind::assign, 0, 0), old);
  EXPECT_EQ(tapped.ways(wire::Kind::pull, 0, 0), old);
  EXPECT_EQ(tapped.ways(wire::Kind::value, 0, 0), old);
  tapped.step();
  tapped.expect_way(0, 1, 0, 1);
}

TEST(Priorities, ARuleGoesBeforeItsPushesOnTheirConnections) {
  TappedCluster tapped(2, separate_layers(2));
  ASSERT_TRUE(tapped.cluster->connected());
  Layer layer = vector_layer("stored", kElements);
  layer.stored = true;
  tapped.add({layer});
  for (const int priority_class : {1, 0}) {
    tapped.set_all({{0.5, priority_class}}, 0.5);
    for (auto& client : tapped.cluster->clients) ASSERT_TRUE(client->set_rule(tapped.first, UpdateRule()).ok());
    tapped.step();
  }
  std::set<std::size_t> told;  // connections
  std::size_t rule_count = 0;
  for (const Tap::Seen& one : tapped.tap.seen()) {
    if (one.header.unit != tapped.units[0] || !one.to_server) continue;
    if (one.header.kind == wire::Kind::rule) {
      told.insert(one.connection);
      ++rule_count;
      EXPECT_EQ(one.header.priority, level_of(0.5)) << "else pushes could overtake it";
    }
    if (one.header.kind == wire::Kind::push && one.rank == 0)
      EXPECT_TRUE(told.contains(one.connection)) << "step " << one.header.step;
  }
  EXPECT_EQ(rule_count, 2u) << "once for each class";
}

/// A server that has sent everything closes its connections. On an idle class this happens before its last results have
/// arrived.
TEST(Priorities, AServersGoodbyeOnOneClassIsNotTheEndOfAnother) {
  TappedCluster tapped(1, separate_layers(2));
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(1));
  tapped.set_all({{0, 1}}, 0.5);
  Client& client = *tapped.cluster->clients[0];
  tapped.tap.hold(1);
  std::vector<float> gradient(kElements, 1.0F);
  ASSERT_TRUE(client.start(tapped.first, bytes_of(gradient), 2).ok());
  ASSERT_TRUE(eventually([&] { return tapped.count(wire::Kind::result, 0, 1) >= 4; }));
  tapped.server->shutdown();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time for what must not happen, over TCP
  EXPECT_FALSE(client.done(tapped.first));
  tapped.tap.release();
  const Status status = client.wait(tapped.first, always);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(gradient, std::vector<float>(kElements, 0.5F));
  ASSERT_TRUE(client.start(tapped.first, bytes_of(gradient), 1).ok());
  EXPECT_EQ(client.wait(tapped.first, always).code(), ErrorCode::peer_lost) << "nobody answers any more";
}

TEST(Priorities, OfMoreClassesThanTheServerKnows) {
  TappedCluster tapped(2, separate_layers(5));  // the server has 2
  ASSERT_TRUE(tapped.cluster->connected());
  tapped.add(layers_of(5));
  tapped.set_all({{1, 0}, {0.8, 1}, {0.6, 2}, {0.4, 3}, {0.2, 4}}, 0.5);
  tapped.step();
  for (std::uint32_t i = 0; i < 5; ++i) tapped.expect_way(i, 1, i, 1 - 0.2 * i);
}

}  // namespace
}  // namespace poseidon::testing
