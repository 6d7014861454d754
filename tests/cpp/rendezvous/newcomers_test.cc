// Which processes get into a job that goes on: those of the same run, and others only with its members.
#include "rendezvous/newcomers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/rendezvous/memory_store.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/members.h"
#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::contains;
using testing::kRejoin;
using testing::kShrink;
using testing::MemoryStore;
using testing::run_ranks;

struct Who {
  int slot;
  std::uint32_t last = 0;
  std::string run = "";
};

using KeepWaiting = std::function<bool()>;

Result<Membership> join(MemoryStore& store, const Who& who, OnFailure on_failure, int world_size = 2,
                        const KeepWaiting& keep_waiting = always) {
  Options options;
  options.rank = who.slot;
  options.world_size = world_size;
  options.on_failure = on_failure;
  options.generation = who.last;
  options.run = who.run;
  options.timeout = milliseconds(6'000);
  return meet(*store.open(), options, Member(), keep_waiting);
}

testing::Beside<Result<Membership>> begin_to_join(MemoryStore& store, const Who& who, OnFailure on_failure) {
  return testing::run_beside([&store, who, on_failure] { return join(store, who, on_failure); });
}

void begin(MemoryStore& store, const std::string& run, OnFailure on_failure) {
  run_ranks(2, [&](int slot) { ASSERT_TRUE(join(store, {slot, 0, run}, on_failure).ok()); });
}

/// What the members of generation 1 do between their steps, until nobody waits any more.
void train_until(MemoryStore& store, const std::vector<testing::Beside<Result<Membership>>*>& over) {
  const auto view = store.open();
  for (auto* one : over)
    while (!one->is_done_after(milliseconds(20))) ASSERT_EQ(generation_wanted(*view, "default"), 1u);
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfAnotherRunAreRefusedAtOnceAndTheMembersLearnOfIt) {
  for (const OnFailure on_failure : {OnFailure::abort, kRejoin, kShrink}) {
    MemoryStore store;
    begin(store, "the first", kRejoin);
    const auto begun = Clock::now();
    for (const int slot : {0, 1}) {
      const auto joined = join(store, {slot, 0, "the second"}, on_failure);
      ASSERT_FALSE(joined.ok());
      EXPECT_EQ(joined.status().code(), ErrorCode::refused);
      EXPECT_TRUE(contains(joined.status(), "another run (the first")) << joined.status().message();
      EXPECT_TRUE(contains(joined.status(), "MASTER_PORT"));
    }
    EXPECT_LT(Clock::now() - begun, milliseconds(500));
    EXPECT_EQ(generation_wanted(*store.open(), "default"), 1u);
    EXPECT_NE(last_refused(*store.open(), "default").find("the second"), std::string::npos);
  }
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfTheSameRunNeedNobodysLeave) {
  MemoryStore store;
  begin(store, "the run", kRejoin);
  auto replacement = begin_to_join(store, {1, 0, "the run"}, kRejoin);
  while (generation_wanted(*store.open(), "default") < 2) pause_for(milliseconds(2));
  EXPECT_TRUE(join(store, {0, 1, "the run"}, kRejoin).ok());
  EXPECT_TRUE(replacement.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunAreRefusedWhileAllMembersLive) {
  for (const OnFailure on_failure : {kRejoin, kShrink}) {
    MemoryStore store;
    begin(store, "", on_failure);
    auto first = begin_to_join(store, {0}, on_failure);
    auto second = begin_to_join(store, {1}, on_failure);
    train_until(store, {&first, &second});
    for (auto* one : {&first, &second}) {
      const auto joined = one->get();
      ASSERT_FALSE(joined.ok());
      EXPECT_EQ(joined.status().code(), ErrorCode::refused);
      EXPECT_TRUE(contains(joined.status(), "goes on at this address")) << joined.status().message();
    }
    EXPECT_NE(last_refused(*store.open(), "default").find("was refused"), std::string::npos);
  }
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunGetInWhenTheSurvivorsFormTheirNextGeneration) {
  for (const std::string run : {"", "the run"}) {  // the survivors', of which their replacement does not know
    MemoryStore store;
    begin(store, run, kRejoin);
    auto replacement = begin_to_join(store, {1}, kRejoin);
    pause_for(milliseconds(100));
    EXPECT_EQ(generation_wanted(*store.open(), "default"), 1u);
    const auto survivor = join(store, {0, 1, run}, kRejoin);
    ASSERT_TRUE(survivor.ok()) << survivor.status().message();
    EXPECT_EQ(survivor.value().generation, 2u);
    EXPECT_TRUE(replacement.get().value().joining);
  }
}

// Ranks 0 and 1 form the generation after the loss of rank 2. Then rank 0, which is to write the roster, is lost, too.
TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunReplaceAProcessThatEndedWhileAGenerationWasBeingFormed) {
  MemoryStore store;
  run_ranks(3, [&](int slot) { ASSERT_TRUE(join(store, {slot}, kRejoin, 3).ok()); });
  auto survivor = testing::run_beside([&] { return join(store, {1, 1}, kRejoin, 3); });
  int looks = 0;
  EXPECT_FALSE(join(store, {0, 1}, kRejoin, 3, [&looks] { return ++looks < 20; }).ok());
  auto replacement = testing::run_beside([&] { return join(store, {2}, kRejoin, 3); });
  const auto joined = join(store, {0}, kRejoin, 3);
  ASSERT_TRUE(joined.ok()) << joined.status().message();
  EXPECT_EQ(joined.value().generation, 3u);
  EXPECT_TRUE(replacement.get().ok());
  EXPECT_TRUE(survivor.get().ok());
}

// Both have met, and rank 1 is lost before anybody has a connection to it.
TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunReplaceAMemberThatEndedBeforeItConnected) {
  MemoryStore store;
  begin(store, "", kRejoin);
  auto lost = begin_to_join(store, {1, 1}, kRejoin);
  const auto membership = join(store, {0, 1}, kRejoin);
  ASSERT_TRUE(membership.ok() && lost.get().ok());
  auto replacement = begin_to_join(store, {1}, kRejoin);
  const auto view = store.open();
  while (stands(*view, "default", membership.value())) {
    admit_newcomers(*view, "default", 2, 0);
    pause_for(milliseconds(20));
  }
  EXPECT_EQ(join(store, {0, 2}, kRejoin).value().generation, 3u);
  EXPECT_TRUE(replacement.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunAreRefusedByTheProcessThatWaitsInTheirSlot) {
  MemoryStore store;
  begin(store, "", kRejoin);
  auto survivor = begin_to_join(store, {0, 1}, kRejoin);
  const auto stranger = join(store, {0}, kRejoin);
  EXPECT_EQ(stranger.status().code(), ErrorCode::refused);
  EXPECT_TRUE(contains(stranger.status(), "its rank 0 lives")) << stranger.status().message();
  EXPECT_TRUE(join(store, {1}, kRejoin).value().joining);
  EXPECT_EQ(survivor.get().value().generation, 2u);
}

TEST_IN_VIRTUAL_TIME(Newcomers, OfNoRunGetASlotThatNobodyHas) {
  MemoryStore store;
  begin(store, "", kShrink);
  ASSERT_TRUE(join(store, {0, 1}, kShrink).ok());
  auto late = begin_to_join(store, {1}, kShrink);
  const auto view = store.open();
  while (generation_wanted(*view, "default") == 2) pause_for(milliseconds(20));
  EXPECT_TRUE(join(store, {0, 2}, kShrink).ok());
  EXPECT_TRUE(late.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Newcomers, AFullSetIsRefusedAlthoughASlotIsFree) {
  MemoryStore store;
  begin(store, "", kShrink);
  ASSERT_TRUE(join(store, {0, 1}, kShrink).ok());
  auto first = begin_to_join(store, {0}, kShrink);
  auto second = begin_to_join(store, {1}, kShrink);
  const auto view = store.open();
  for (auto* one : {&first, &second}) {
    while (!one->is_done_after(milliseconds(20))) ASSERT_EQ(generation_wanted(*view, "default"), 2u);
    EXPECT_EQ(one->get().status().code(), ErrorCode::refused);
  }
}

TEST_IN_VIRTUAL_TIME(Newcomers, WhomNobodyAnswersAreTold) {
  MemoryStore store;
  begin(store, "", kRejoin);
  const auto joined = join(store, {1}, kRejoin);
  EXPECT_EQ(joined.status().code(), ErrorCode::timeout);
  EXPECT_TRUE(contains(joined.status(), "which goes on at this address, to take it in")) << joined.status().message();
}

}  // namespace
}  // namespace poseidon
