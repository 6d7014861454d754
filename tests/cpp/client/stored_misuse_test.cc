// Wrong uses of stored layers. They are refused at once with the layer's name, and do no harm.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/reference_update.h"

namespace poseidon::testing {
namespace {

Layer stored_layer(const std::string& name, std::size_t element_count, DType dtype = DType::float32) {
  Layer layer = vector_layer(name, element_count, dtype);
  layer.stored = true;
  return layer;
}

UpdateRule rule_of(const std::string& kind) {
  if (kind == "sgd") return testing::rule_of(kind, {{"lr", 0.5}});
  return testing::rule_of(kind, {{"lr", 0.5}, {"beta1", 0.9}, {"beta2", 0.99}, {"eps", 1e-8}});
}

void expect_invalid(const Status& status, const std::string& layer, const std::string& word) {
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument) << word;
  EXPECT_TRUE(contains(status, "'" + layer + "'")) << status.message();
  EXPECT_TRUE(contains(status, word)) << status.message();
}

TEST(Stored, WhatCannotWorkIsRefusedAndTheClientStaysUsable) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  Layer whole = stored_layer("whole", 100);
  whole.whole = true;
  const auto first =
      cluster.add({vector_layer("plain", 100'000), stored_layer("values", 100),
                   stored_layer("integers", 100, DType::int32), stored_layer("halves", 100, DType::float16), whole});
  const auto plain = first;
  const auto values = first + 1;
  const auto integers = first + 2;
  const auto halves = first + 3;
  cluster.each([&](std::size_t, Client& client) {
    Floats large(100'000);
    Floats array(100, 1.0F);
    Floats other(101);
    Bytes half(200);
    expect_invalid(client.push(plain, bytes_of(large), 1), "plain", "not stored");
    expect_invalid(client.pull(plain, bytes_of(large)), "plain", "not stored");
    expect_invalid(client.assign(plain, bytes_of(large)), "plain", "not stored");
    expect_invalid(client.set_rule(plain, rule_of("sgd")), "plain", "not stored");
    expect_invalid(client.push(values, bytes_of(other), 1), "values", "404");
    expect_invalid(client.pull(values, bytes_of(other)), "values", "404");
    expect_invalid(client.assign(values, bytes_of(other)), "values", "404");
    expect_invalid(client.push_pull(values, bytes_of(array), bytes_of(other), 1), "values", "404");
    expect_invalid(client.push_pull(values, bytes_of(other), bytes_of(array), 1), "values", "404");
    expect_invalid(client.push(values, bytes_of(array), 0), "values", "divided by 0");
    expect_invalid(client.push(integers, bytes_of(array), 2), "integers", "int32");
    expect_invalid(client.set_rule(integers, rule_of("sgd")), "integers", "int32");
    expect_invalid(client.set_rule(halves, rule_of("adam")), "halves", "float16");
    expect_invalid(client.set_rule(values, rule_of("lamb")), "values", "lamb");
    EXPECT_TRUE(client.set_rule(first + 4, rule_of("lamb")).ok());
    EXPECT_TRUE(client.set_rule(integers, {}).ok()) << "no rule fits every dtype";
    EXPECT_EQ(client.set_rule(first + 99, {}).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(client.pull(first + 99, bytes_of(array)).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(client.start_factors(values, DType::float32, {}, bytes_of(array), 1, false).code(),
              ErrorCode::invalid_argument);

    ASSERT_TRUE(client.push_pull(values, bytes_of(array), bytes_of(array), 2).ok());
    Floats second(100);
    if (Status status = client.pull(values, bytes_of(second)); !status.ok()) expect_invalid(status, "values", "twice");
    EXPECT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(array, Floats(100, 1.0F));
  });
}

TEST(Stored, ASecondOperationWhileOneIsUnderWayIsRefused) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 100)});
  Floats array(100, 1.0F);
  Floats other(100, 2.0F);
  Client& client = *cluster.clients[0];
  ASSERT_TRUE(client.pull(layer, bytes_of(array)).ok());  // there is no value yet: it waits
  expect_invalid(client.pull(layer, bytes_of(other)), "values", "twice");
  expect_invalid(client.push(layer, bytes_of(other), 1), "values", "twice");
  expect_invalid(client.assign(layer, bytes_of(other)), "values", "twice");
  ASSERT_TRUE(cluster.clients[1]->assign(layer, bytes_of(other)).ok());
  for (const auto& each : cluster.clients) EXPECT_TRUE(each->wait_all(always).ok());
  EXPECT_EQ(array, other);
}

TEST(Stored, ASecondRuleReplacesTheFirstBeforeThePush) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 10)});
  cluster.each([&](std::size_t rank, Client& client) {
    Floats values(10, 8.0F);
    Floats gradient(10, 1.0F);
    if (rank == 0) EXPECT_TRUE(client.assign(layer, bytes_of(values)).ok());
    EXPECT_TRUE(client.wait_all(always).ok());
    UpdateRule rule = rule_of("sgd");
    EXPECT_TRUE(client.set_rule(layer, rule).ok());
    rule = testing::with(rule, "lr", 2);
    EXPECT_TRUE(client.set_rule(layer, rule).ok());
    ASSERT_TRUE(client.push_pull(layer, bytes_of(gradient), bytes_of(values), 2).ok());
    EXPECT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(values, Floats(10, 6.0F));
  });
}

TEST(Stored, AnUpdateWithoutParametersEndsTheJobWithTheLayersName) {
  TestCluster cluster(cluster_options(2));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 10)});
  cluster.each([&](std::size_t, Client& client) {
    Floats gradient(10, 1.0F);
    EXPECT_TRUE(client.set_rule(layer, rule_of("sgd")).ok());
    (void)client.push(layer, bytes_of(gradient), 1);  // refused where the other rank's news is faster
    const Status status = client.wait_all(always);
    EXPECT_EQ(status.code(), ErrorCode::refused);
    EXPECT_TRUE(contains(status, "'values'")) << status.message();
    EXPECT_TRUE(contains(status, "parameters")) << status.message();
  });
}

TEST(Stored, AnArrayThatNoRuleHasEndsTheJobWithTheLayersName) {
  TestCluster cluster(cluster_options(1));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 10)});
  Floats values(10);
  Client& client = *cluster.clients[0];
  ASSERT_TRUE(client.assign(layer, bytes_of(values)).ok());
  ASSERT_TRUE(client.wait_all(always).ok());
  ASSERT_TRUE(client.pull(layer, bytes_of(values), kGradientArray + 1).ok());
  const Status status = client.wait_all(always);
  EXPECT_EQ(status.code(), ErrorCode::refused);
  EXPECT_TRUE(contains(status, "array 6")) << status.message();
  EXPECT_TRUE(contains(status, "'values'")) << status.message();
}

TEST(Stored, ServersWhoseCoresBelongToWorkersKeepNoValues) {
  auto all = cluster_options(2);
  for (auto& options : all) {
    options.assignment = Assignment::worker;
    options.server_cores = 2;
  }
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 10)});
  cluster.each([&](std::size_t rank, Client& client) {
    Floats values(10);
    if (rank == 1) return;
    ASSERT_TRUE(client.pull(layer, bytes_of(values)).ok());
    const Status status = client.wait_all(always);
    EXPECT_EQ(status.code(), ErrorCode::refused);
    EXPECT_TRUE(contains(status, "assignment=worker")) << status.message();
  });
}

TEST(Stored, APullThatNobodyAnswersEndsAtTheTimeout) {
  TestCluster cluster(cluster_options(2, std::chrono::milliseconds(700)));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({stored_layer("values", 10)});
  Floats values(10);
  ASSERT_TRUE(cluster.clients[0]->pull(layer, bytes_of(values)).ok());
  const Status status = cluster.clients[0]->wait_all(always);
  EXPECT_EQ(status.code(), ErrorCode::timeout);
  EXPECT_TRUE(contains(status, "'values'")) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
