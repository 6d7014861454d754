// A kind of update rule that is registered at run time trains a chunk like a built-in one.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/contributions.h"
#include "server/core/shard.h"
#include "wire/messages/rule.h"

namespace poseidon {
namespace {

using testing::bytes_of;
using testing::Floats;
using testing::header_of;
using testing::rule_of;
using testing::stored_push_of;
using testing::values_of;
using testing::with_size;

/// RMSprop: divides by the root of a running average of the squares, which is its state.
struct Rmsprop {
  template <typename T>
  void operator()(const UpdateCall<T>& call) const {
    const auto lr = static_cast<T>(call.values[0]);
    const auto alpha = static_cast<T>(call.values[1]);
    for (std::size_t i = 0; i < call.parameters.size(); ++i) {
      const T gradient = call.gradient[i];
      call.states[0][i] = alpha * call.states[0][i] + (1 - alpha) * gradient * gradient;
      call.parameters[i] -= lr * gradient / (std::sqrt(call.states[0][i]) + T{1e-8F});
    }
  }
};

UpdateKind rmsprop(const std::string& name) {
  UpdateKind kind;
  kind.name = name;
  kind.values = {{.name = "lr", .least = 0}, {.name = "alpha", .least = 0, .most = 1, .initial = 0.99}};
  kind.state_count = [](std::span<const double>) { return std::size_t{1}; };
  kind.update_float32 = Rmsprop();
  kind.update_float64 = Rmsprop();
  return kind;
}

void expect_invalid(const Status& status, const std::string& word) {
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument) << word;
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
}

TEST(RegisteredRule, UpdatesAChunk) {
  ASSERT_TRUE(register_update_rule(rmsprop("rmsprop")).ok());
  const UpdateRule rule = rule_of("rmsprop", {{"lr", 0.1}, {"alpha", 0.75}});
  EXPECT_EQ(update_state_count(rule), 1u);
  constexpr std::uint32_t kWorkers = 2;
  Shard shard(kWorkers, {}, {});
  std::vector<testing::RecordingRequester> workers(kWorkers);
  Floats expected{1, -2, 3};
  const auto assign = with_size(header_of(wire::Kind::assign, 0, kWorkers), expected.size() * sizeof(float));
  ASSERT_TRUE(shard.assign(assign, bytes_of(expected)).ok());
  const auto message = wire::Rule{rule}.make(header_of(wire::Kind::rule, 0, kWorkers));
  ASSERT_TRUE(shard.set_rule(message.header, message.payload()).ok());
  Floats average(expected.size(), 0);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const Floats gradient{0.5F, 4, -1};
    const auto lent = bytes_of(gradient);
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      auto push = with_size(stored_push_of(rank, kWorkers, step), lent.size());
      push.divisor = kWorkers;
      ASSERT_TRUE(shard.add(push, workers[rank], lent, [] {}).ok());
    }
    UpdateCall<float> call;
    call.parameters = expected;
    call.gradient = gradient;
    call.states[0] = average;
    call.update_count = step;
    call.values = rule.values;
    rule.kind->update_float32(call);
    for (const auto& worker : workers) EXPECT_EQ(values_of<float>(worker.sent.back().payload), expected);
  }
}

TEST(RegisteredRule, ThatServersDoNotKnowIsRefused) {
  ASSERT_TRUE(register_update_rule(rmsprop("known_to_workers")).ok());
  auto message = wire::Rule{rule_of("known_to_workers")}.make(header_of(wire::Kind::rule, 0, 1));
  std::vector<std::byte> bytes(message.payload().begin(), message.payload().end());
  bytes[0] = std::byte{'x'};
  Shard shard(1, {}, {});
  const Status status = shard.set_rule(message.header, bytes);
  EXPECT_EQ(status.code(), ErrorCode::refused);
  for (const char* word : {"'xnown_to_workers'", "sgd, adam, adamw, lamb", "register_update_rule"})
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
}

TEST(RegisteredRule, HasANameOfItsOwnAndAllItsFunctions) {
  expect_invalid(register_update_rule(rmsprop("sgd")), "registered already");
  for (const char* name : {"", "none", "RMSprop", "a b", "a_name_of_25_letters_long_"})
    expect_invalid(register_update_rule(rmsprop(name)), "lower-case letters");
  UpdateKind kind = rmsprop("without_a_function");
  kind.update_float64 = nullptr;
  expect_invalid(register_update_rule(kind), "lacks a function");
  kind = rmsprop("with_two_of_a_name");
  kind.values.push_back(kind.values[0]);
  expect_invalid(register_update_rule(kind), "'lr'");
  kind = rmsprop("with_many_values");
  for (std::size_t i = 0; i <= kMaxUpdateValues; ++i) kind.values.push_back({.name = "v" + std::to_string(i)});
  expect_invalid(register_update_rule(kind), "at most 12");
}

TEST(RegisteredRule, HasTheValuesOfItsKindInTheirRanges) {
  expect_invalid(make_update_rule("sgdd").status(), "none, sgd, adam, adamw, lamb");
  expect_invalid(make_update_rule("sgd", {{"beta1", 0.9}}).status(), "lr, momentum");
  expect_invalid(make_update_rule("sgd", {{"nesterov", 2}}).status(), "0 or 1");
  expect_invalid(make_update_rule("sgd", {{"lr", std::nan("")}}).status(), "must be finite");
  expect_invalid(make_update_rule("none", {{"lr", 1}}).status(), "'lr'");
  ASSERT_TRUE(register_update_rule(rmsprop("in_ranges")).ok());
  expect_invalid(make_update_rule("in_ranges", {{"alpha", 1.5}}).status(), "alpha=1.5");
  expect_invalid(make_update_rule("in_ranges", {{"alpha", 1.5}}).status(), "must be from 0.000000 to 1.000000");
  expect_invalid(make_update_rule("in_ranges", {{"lr", -1}}).status(), "must be at least 0.000000");
  EXPECT_EQ(testing::value_of(rule_of("in_ranges"), "alpha"), 0.99);
}

}  // namespace
}  // namespace poseidon
