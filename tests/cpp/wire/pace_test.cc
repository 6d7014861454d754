// Pace: the part of a hello that is about stragglers and consistency.
#include "wire/pace.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "wire/messages/hello.h"

namespace poseidon::wire {
namespace {

TEST(Pace, TravelsInTheHello) {
  for (const Pace& pace :
       {Pace(), Pace{Stragglers::drop, Consistency::bsp, 64, 2.5F}, Pace{Stragglers::wait, Consistency::ssp, 7, 0},
        Pace{Stragglers::wait, Consistency::async}}) {
    const TextMessage message = Hello{1, 2, "a job", 3, {}, 4, 5, pace}.make();
    const Hello hello = Hello::read(message.header, message.payload());
    ASSERT_TRUE(hello.pace);
    EXPECT_EQ(*hello.pace, pace);
    EXPECT_EQ(hello.flow, 3u);
    EXPECT_EQ(hello.priority_class, 4u);
    EXPECT_EQ(hello.generation, 5u);
  }
}

TEST(Pace, WhatNoOptionsGiveIsNone) {
  EXPECT_TRUE(pace_of(PaceNumbers{1, 64, 3}));
  for (const PaceNumbers& numbers :
       {PaceNumbers{1, 0, 3}, PaceNumbers{1, 65, 3}, PaceNumbers{1, 8, -1}, PaceNumbers{1, 8, std::nanf("")},
        PaceNumbers{1, 8, std::numeric_limits<float>::infinity()}, PaceNumbers{0, 1, 0}, PaceNumbers{0, 0, 1},
        PaceNumbers{2, kMostStaleness + 1, 0}, PaceNumbers{2, 1, 1}, PaceNumbers{3, 1, 0}, PaceNumbers{4, 0, 0}})
    EXPECT_FALSE(pace_of(numbers)) << int{numbers.choice} << " " << numbers.bound;
  std::mt19937 random(6);
  for (int i = 0; i < 2000; ++i) {
    PaceNumbers numbers;
    numbers.choice = static_cast<std::uint8_t>(random() % 5);
    numbers.bound = static_cast<std::uint32_t>(random() % 80);
    numbers.factor = random() % 2 == 0 ? 0 : std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    const auto pace = pace_of(numbers);
    if (!pace) continue;
    const PaceNumbers again = numbers_of(*pace);
    EXPECT_EQ(again.choice, numbers.choice);
    EXPECT_EQ(again.bound, numbers.bound);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(again.factor), std::bit_cast<std::uint32_t>(numbers.factor));
  }
}

TEST(Pace, OptionsOutOfRangeAreRefusedByName) {
  const auto refusal = [](const std::function<void(Options&)>& change) {
    Options options;
    change(options);
    const auto pace = pace_of(options);
    EXPECT_EQ(pace.status().code(), ErrorCode::invalid_argument);
    return pace.status().message();
  };
  const auto drop = [](Options& options) { options.stragglers = Stragglers::drop; };
  EXPECT_NE(refusal([&](Options& o) { drop(o), o.straggler_steps = 65; }).find("straggler_steps"), std::string::npos);
  EXPECT_NE(refusal([&](Options& o) { drop(o), o.straggler_steps = 0; }).find("straggler_steps"), std::string::npos);
  EXPECT_NE(refusal([&](Options& o) { drop(o), o.straggler_factor = -1; }).find("straggler_factor"), std::string::npos);
  EXPECT_NE(refusal([&](Options& o) { o.consistency = Consistency::ssp, o.staleness = -1; }).find("staleness"),
            std::string::npos);
  EXPECT_TRUE(pace_of(Options()).ok());
}

}  // namespace
}  // namespace poseidon::wire
