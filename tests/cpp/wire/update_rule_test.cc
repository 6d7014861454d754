// Update rules as bytes: encoding and decoding gives an equal rule, and bytes of no rule are refused.
#include "wire/update_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpp/kernel/rules.h"
#include "wire/messages/rule.h"

namespace poseidon::wire {
namespace {

using Bytes = std::vector<std::byte>;
using testing::rule_of;

constexpr std::size_t kFirstNumberAt = kMaxUpdateNameBytes + 8;
constexpr std::size_t kAggregatorAt = kFirstNumberAt + kMaxUpdateValues * sizeof(double);

UpdateRule full_rule(const std::string& kind = "adamw") {
  UpdateRule rule = rule_of(kind, {{"lr", 1e-3},
                                   {"beta1", -0.0},
                                   {"beta2", std::nextafter(1.0, 0.0)},
                                   {"eps", std::numeric_limits<double>::denorm_min()},
                                   {"weight_decay", -std::numeric_limits<double>::max()},
                                   {"maximize", 1}});
  rule.keeps_gradient = true;
  rule.aggregator = "an_aggregator_of_24_byte";
  return rule;
}

Bytes bytes_of(const UpdateRule& rule) {
  const auto bytes = encode_update_rule(rule);
  return {bytes.begin(), bytes.end()};
}

void expect_no_rule(const Bytes& bytes, const std::string& word) {
  const auto rule = decode_update_rule(bytes);
  ASSERT_FALSE(rule.ok()) << word;
  EXPECT_EQ(rule.status().code(), ErrorCode::mismatch);
  EXPECT_NE(rule.status().message().find(word), std::string::npos) << rule.status().message();
}

TEST(Rule, RoundTrip) {
  const UpdateRule sgd = rule_of("sgd", {{"momentum", -0.0}, {"dampening", 0.25}, {"nesterov", 1}});
  for (const UpdateRule& rule : {UpdateRule(), sgd, full_rule("adam"), full_rule(), full_rule("lamb")}) {
    const auto read = decode_update_rule(encode_update_rule(rule));
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ(read.value(), rule);
    EXPECT_EQ(read.value().kind, rule.kind);
  }
}

TEST(Rule, IsAMessageAboutAUnit) {
  Header about;
  about.unit = 9;
  about.rank = 3;
  about.step = 5;
  about.priority = 321;
  const TextMessage message = Rule{full_rule()}.make(about);
  EXPECT_EQ(message.header.kind, Kind::rule);
  EXPECT_EQ(message.header.unit, 9u);
  EXPECT_EQ(message.header.rank, 3u);
  EXPECT_EQ(message.header.payload_bytes, kUpdateRuleBytes);
  EXPECT_EQ(message.header.priority, 321) << "of the pushes that it stands before";
  const auto read = Rule::read(message.payload());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().rule, full_rule());
}

TEST(Rule, OfAnotherSizeIsNone) {
  Bytes bytes = bytes_of(full_rule());
  for (std::size_t size = 0; size < kUpdateRuleBytes; ++size)
    expect_no_rule({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)}, std::to_string(size) + " bytes");
  bytes.push_back(std::byte{0});
  expect_no_rule(bytes, "153 bytes");
}

TEST(Rule, OfAnUnknownKindOrWithoutANumberIsNone) {
  for (const std::string name : {"adamx", "sg", "Adam", "none", "a_kind_of_24_letters_long"}) {
    Bytes bytes = bytes_of(full_rule());
    std::memset(bytes.data(), 0, kMaxUpdateNameBytes);
    std::memcpy(bytes.data(), name.data(), std::min(name.size(), kMaxUpdateNameBytes));
    expect_no_rule(bytes, "kind '" + name.substr(0, kMaxUpdateNameBytes) + "'");
  }
  for (const double number : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    for (std::size_t at = kFirstNumberAt; at < kAggregatorAt; at += sizeof number) {
      Bytes bytes = bytes_of(full_rule());
      std::memcpy(bytes.data() + at, &number, sizeof number);
      const bool is_value = at < kFirstNumberAt + full_rule().kind->values.size() * sizeof number;
      expect_no_rule(bytes, is_value ? "finite" : "other values");
    }
  }
}

/// In a process with another version of the kind, the same bytes mean other values.
TEST(Rule, OfAKindWithOtherValuesIsNone) {
  Bytes bytes = bytes_of(full_rule());
  bytes[kMaxUpdateNameBytes + 1] = std::byte{5};
  expect_no_rule(bytes, "other values");
  bytes = bytes_of(full_rule());
  bytes[kMaxUpdateNameBytes + 4] ^= std::byte{1};
  expect_no_rule(bytes, "other values");
}

TEST(Rule, WithoutTheNameOfAnAggregatorIsNone) {
  for (const std::string name : {"", "Sum", "two words", "sum-"}) {
    Bytes bytes = bytes_of(full_rule());
    std::memset(bytes.data() + kAggregatorAt, 0, kMaxAggregatorNameBytes);
    std::memcpy(bytes.data() + kAggregatorAt, name.data(), name.size());
    expect_no_rule(bytes, "aggregator '" + name + "'");
  }
  Bytes bytes = bytes_of(rule_of("sgd"));
  bytes.back() = std::byte{'x'};  // behind the end of the name
  expect_no_rule(bytes, "other values");
}

TEST(Rule, RandomBytesAreARuleOrNone) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20'000; ++i) {
    Bytes bytes = bytes_of(full_rule());
    for (int change = 0; change < 4; ++change) bytes[random() % kUpdateRuleBytes] = static_cast<std::byte>(random());
    const auto rule = decode_update_rule(bytes);
    if (!rule.ok()) continue;
    const auto again = decode_update_rule(encode_update_rule(rule.value()));
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again.value(), rule.value());
  }
}

}  // namespace
}  // namespace poseidon::wire
