// Jobs that begin with some of their workers and take in others, also those that do not fit.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "base/clock.h"
#include "cpp/rendezvous/gathering_cases.h"
#include "poseidon/store.h"
#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::begin_to_join;
using testing::join;
using testing::MemoryStore;
using testing::shrinking;
using testing::slots_of;

TEST_IN_VIRTUAL_TIME(Growth, AJobBeginsWithMinWorkersAndTakesInOthers) {
  MemoryStore store;
  auto options = std::vector{shrinking(0, 4), shrinking(2, 4), shrinking(3, 4)};
  for (Options& one : options) one.min_workers = 2;
  auto first = begin_to_join(store, options[0]);
  pause_for(milliseconds(400));  // three windows
  const auto begun = Clock::now();
  const auto second = join(store, options[1]);
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_LT(Clock::now() - begun, milliseconds(700));
  EXPECT_EQ(slots_of(second.value()), (std::vector{0, 2}));
  EXPECT_EQ(first.get().value().generation, 1u);
  auto newcomer = begin_to_join(store, options[2]);
  while (generation_wanted(*store.open(), "default") < 2) pause_for(milliseconds(2));
  for (Options& one : options) one.generation = 1;
  options.pop_back();
  for (Options& one : options) one.timeout = milliseconds(60000);  // with a window of 1 s
  const auto joined = Clock::now();
  const auto all = join_all(store, options);
  EXPECT_LT(Clock::now() - joined, milliseconds(500)) << "nobody is missing";
  EXPECT_EQ(slots_of(all[1]), (std::vector{0, 2, 3}));
  EXPECT_TRUE(newcomer.get().value().joining);
}

// What begins without rank 0 has perhaps missed the end of the job, which rank 0 has left with all others.
TEST_IN_VIRTUAL_TIME(Growth, NoJobBeginsWithoutRankZero) {
  MemoryStore store;
  auto options = std::vector{shrinking(1, 4), shrinking(2, 4)};
  for (Options& one : options) one.min_workers = 2;
  auto first = begin_to_join(store, options[0]);
  const auto second = join(store, options[1]);
  EXPECT_EQ(second.status().code(), ErrorCode::timeout);
  EXPECT_EQ(first.get().status().code(), ErrorCode::timeout);
}

// The members come at the end of their step, which may take longer than a window.
TEST_IN_VIRTUAL_TIME(Growth, NewcomersDoNotBeginBesideMembers) {
  MemoryStore store;
  std::vector<Options> options;
  for (int slot = 0; slot < 4; ++slot) {
    options.push_back(shrinking(slot, 4));
    options.back().min_workers = 2;
  }
  auto member = begin_to_join(store, options[0]);
  auto other = begin_to_join(store, options[1]);
  ASSERT_EQ(member.get().value().generation, 1u);
  ASSERT_EQ(other.get().value().generation, 1u);
  auto newcomer = begin_to_join(store, options[2]);
  auto another = begin_to_join(store, options[3]);
  for (int i = 0; i < 5; ++i) {  // windows
    pause_for(milliseconds(100));
    generation_wanted(*store.open(), options[0].job);
  }
  options[0].generation = options[1].generation = 1;
  auto again = begin_to_join(store, options[0]);
  auto other_again = begin_to_join(store, options[1]);
  EXPECT_EQ(slots_of(newcomer.get().value()), (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(slots_of(again.get().value()), (std::vector{0, 1, 2, 3}));
}

TEST_IN_VIRTUAL_TIME(Growth, ANewcomerThatDoesNotFitEndsAlone) {
  MemoryStore store;
  auto options = std::vector{shrinking(0, 3), shrinking(1, 3), shrinking(2, 3)};
  for (Options& one : options) one.min_workers = 2;
  auto member = begin_to_join(store, options[0]);
  auto other = begin_to_join(store, options[1]);
  ASSERT_EQ(member.get().value().generation, 1u);
  ASSERT_EQ(other.get().value().generation, 1u);
  options[2].chunk_bytes = 4096;
  options[0].generation = options[1].generation = 1;
  auto newcomer = begin_to_join(store, options[2], 2);
  auto again = begin_to_join(store, options[0], 2);
  auto other_again = begin_to_join(store, options[1], 2);
  EXPECT_EQ(newcomer.get().status().code(), ErrorCode::mismatch);
  EXPECT_EQ(slots_of(again.get().value()), (std::vector{0, 1}));
}

TEST_IN_VIRTUAL_TIME(Growth, NobodyWaitsForOneThatHasLeft) {
  MemoryStore store;
  auto options = std::vector{shrinking(0, 3), shrinking(1, 3), shrinking(2, 3)};
  for (Options& one : options) one.timeout = std::chrono::seconds(60);  // so that a window is 1 s
  std::vector<testing::Beside<Result<Membership>>> all;
  for (const Options& one : options) all.push_back(begin_to_join(store, one));
  for (auto& one : all) ASSERT_EQ(one.get().value().generation, 1u);
  note_left(*store.open(), options[2].job, 1, 2);
  options[0].generation = options[1].generation = 1;
  const auto begun = Clock::now();
  auto again = begin_to_join(store, options[0], 2);
  auto other_again = begin_to_join(store, options[1], 2);
  EXPECT_EQ(slots_of(again.get().value()), (std::vector{0, 1}));
  EXPECT_LT(Clock::now() - begun, milliseconds(400));
}

}  // namespace
}  // namespace poseidon
