// Pace: what a hello says of stragglers and consistency.
#include "wire/pace.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "wire/messages.h"

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
  const auto header_of = [](std::uint32_t number, std::uint32_t bound, float factor) {
    Header header;
    header.unit = number;
    header.cols = bound;
    header.factor_count = std::bit_cast<std::uint32_t>(factor);
    return header;
  };
  EXPECT_TRUE(read_pace(header_of(1, 64, 3)));
  for (const Header& header :
       {header_of(1, 0, 3), header_of(1, 65, 3), header_of(1, 8, -1), header_of(1, 8, std::nanf("")),
        header_of(1, 8, std::numeric_limits<float>::infinity()), header_of(0, 1, 0), header_of(0, 0, 1),
        header_of(2, kMostStaleness + 1, 0), header_of(2, 1, 1), header_of(3, 1, 0), header_of(4, 0, 0)})
    EXPECT_FALSE(read_pace(header)) << header.unit << " " << header.cols;
  std::mt19937 random(6);
  for (int i = 0; i < 2000; ++i) {
    Header header;
    header.unit = static_cast<std::uint32_t>(random() % 5);
    header.cols = static_cast<std::uint32_t>(random() % 80);
    header.factor_count = random() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random());
    const auto pace = read_pace(header);
    if (!pace) continue;
    Header again;
    write_pace(*pace, again);
    EXPECT_EQ(again.unit, header.unit);
    EXPECT_EQ(again.cols, header.cols);
    EXPECT_EQ(again.factor_count, header.factor_count);
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
  EXPECT_NE(refusal([&](Options& o) { drop(o), o.consistency = Consistency::ssp; }).find("consistency"),
            std::string::npos);
  EXPECT_NE(refusal([&](Options& o) { o.consistency = Consistency::ssp, o.staleness = -1; }).find("staleness"),
            std::string::npos);
  EXPECT_TRUE(pace_of(Options()).ok());
}

}  // namespace
}  // namespace poseidon::wire
