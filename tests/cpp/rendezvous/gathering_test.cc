// How the members of a job's next generation find each other, also if some are lost meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/rendezvous/gathering_cases.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/members.h"
#include "rendezvous/published.h"
#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::begin_to_join;
using testing::contains;
using testing::join;
using testing::join_all;
using testing::kRejoin;
using testing::kShrink;
using testing::MemoryStore;
using testing::options_of;
using testing::remember;
using testing::run_ranks;
using testing::shrinking;
using testing::slots_of;

TEST_IN_VIRTUAL_TIME(Rejoin, AJobBeginsWithItsFirstGeneration) {
  for (const OnFailure on_failure : {kRejoin, kShrink}) {
    MemoryStore store;
    const auto found =
        join_all(store, {options_of(0, 3, on_failure), options_of(1, 3, on_failure), options_of(2, 3, on_failure)});
    for (std::size_t slot = 0; slot < 3; ++slot) {
      EXPECT_EQ(found[slot].generation, 1u);
      EXPECT_EQ(found[slot].rank, static_cast<int>(slot));
      EXPECT_EQ(slots_of(found[slot]), (std::vector{0, 1, 2}));
      EXPECT_EQ(found[slot].members[2].peer_address, "slot 2");
      EXPECT_FALSE(found[slot].joining);
      EXPECT_EQ(found[slot].run, found[0].run);
    }
    EXPECT_EQ(generation_wanted(*store.open(), "default"), 1u);
  }
}

TEST_IN_VIRTUAL_TIME(Rejoin, SurvivorsWaitForTheReplacementWhichKnowsThatItIsNew) {
  MemoryStore store;
  join_all(store, {options_of(0, 3, kRejoin), options_of(1, 3, kRejoin), options_of(2, 3, kRejoin)});
  const auto found =
      join_all(store, {options_of(0, 3, kRejoin, 1), options_of(1, 3, kRejoin), options_of(2, 3, kRejoin, 1)});
  for (const Membership& membership : found) EXPECT_EQ(membership.generation, 2u);
  EXPECT_FALSE(found[0].joining);
  EXPECT_TRUE(found[1].joining);
  EXPECT_EQ(found[0].members[0].last_generation, 1u);
  EXPECT_EQ(found[0].members[1].last_generation, 0u);
}

TEST_IN_VIRTUAL_TIME(Rejoin, TheReplacementMayComeBeforeAnybodyHasNoticed) {
  MemoryStore store;
  const auto first = join_all(store, {options_of(0, 2, kRejoin), options_of(1, 2, kRejoin)});
  EXPECT_TRUE(stands(*store.open(), "default", first[0]));
  auto replacement = begin_to_join(store, options_of(1, 2, kRejoin));
  while (generation_wanted(*store.open(), "default") < 2) pause_for(milliseconds(2));
  EXPECT_FALSE(stands(*store.open(), "default", first[0]));
  const auto survivor = join(store, options_of(0, 2, kRejoin, 1));
  ASSERT_TRUE(survivor.ok()) << survivor.status().message();
  EXPECT_EQ(survivor.value().generation, 2u);
  EXPECT_TRUE(replacement.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Rejoin, WhoHasBeenReplacedIsToldSo) {
  MemoryStore store;
  join_all(store, {options_of(0, 2, kRejoin), options_of(1, 2, kRejoin)});
  join_all(store, {options_of(0, 2, kRejoin, 1), options_of(1, 2, kRejoin)});
  const auto frozen_before = join(store, options_of(1, 2, kRejoin, 1));
  EXPECT_EQ(frozen_before.status().code(), ErrorCode::aborted);
  EXPECT_TRUE(contains(frozen_before.status(), "rank 1 of job 'default' is another process now"))
      << frozen_before.status().message();
}

TEST_IN_VIRTUAL_TIME(Rejoin, WhoTriesAgainIsNotTakenForItsReplacement) {
  MemoryStore store;
  join_all(store, {options_of(0, 2, kRejoin), options_of(1, 2, kRejoin)});
  join_all(store, {options_of(0, 2, kRejoin, 1), options_of(1, 2, kRejoin, 1)});  // and could not connect
  const auto found = join_all(store, {options_of(0, 2, kRejoin, 1), options_of(1, 2, kRejoin, 1)});
  EXPECT_EQ(found[0].generation, 3u);
  EXPECT_EQ(found[1].generation, 3u);
}

TEST_IN_VIRTUAL_TIME(Rejoin, WhatTheStoreLosesIsWrittenAgain) {
  MemoryStore store;
  auto survivor = begin_to_join(store, options_of(1, 3, kRejoin, 6));
  auto other = begin_to_join(store, options_of(2, 3, kRejoin, 6));
  while (!store.has(member_key("default", 1)) || !store.has(member_key("default", 2))) pause_for(milliseconds(2));
  store.set_away(true);
  pause_for(milliseconds(20));
  store.lose_content();  // rank 0's process served it
  store.set_away(false);
  const auto replacement = join(store, options_of(0, 3, kRejoin));
  ASSERT_TRUE(replacement.ok()) << replacement.status().message();
  EXPECT_EQ(replacement.value().generation, 7u);
  EXPECT_TRUE(replacement.value().joining);
  EXPECT_EQ(survivor.get().value().generation, 7u);
  EXPECT_EQ(other.get().value().generation, 7u);
}

TEST_IN_VIRTUAL_TIME(Rejoin, AMembershipWhoseStoreHasLostItsContentDoesNotStand) {
  MemoryStore store;
  const auto found = join_all(store, {options_of(0, 2, kRejoin), options_of(1, 2, kRejoin)});
  store.set_away(true);
  EXPECT_TRUE(stands(*store.open(), "default", found[0])) << "nobody can tell";
  store.set_away(false);
  store.lose_content();
  EXPECT_FALSE(stands(*store.open(), "default", found[0]));
}

TEST_IN_VIRTUAL_TIME(Rejoin, ThoseThatDoNotComeAreNamed) {
  MemoryStore store;
  Options options = options_of(1, 4, kRejoin, 2);
  options.timeout = milliseconds(150);
  auto found = join(store, options);
  EXPECT_EQ(found.status().code(), ErrorCode::timeout);
  EXPECT_TRUE(contains(found.status(), "rank 1 waited 150 ms in generation 3 for rank 0, 2, 3 of 4"))
      << found.status().message();
  store.set_away(true);
  found = join(store, options);
  EXPECT_EQ(found.status().code(), ErrorCode::timeout);
  EXPECT_TRUE(contains(found.status(), "the store is away")) << found.status().message();
}

TEST_IN_VIRTUAL_TIME(Rejoin, TwoProcessesOfOneRankDoNotGoOnForever) {
  for (const milliseconds timeout : {milliseconds(1000), milliseconds(100)}) {
    MemoryStore store;
    Options options = options_of(1, 2, kRejoin);
    options.timeout = timeout;
    std::atomic<bool> over{false};
    std::atomic<int> told{0};
    run_ranks(2, [&](int) {
      for (int attempt = 0; attempt < 20 && !over; ++attempt) {
        const Status outcome = join(store, options).status();
        if (!contains(outcome, "two were started with the same RANK")) continue;
        EXPECT_EQ(outcome.code(), ErrorCode::aborted);
        ++told;
        over = true;
      }
    });
    EXPECT_GE(told, 1) << timeout.count() << " ms";
  }
}

TEST_IN_VIRTUAL_TIME(Rejoin, DifferingOptionsAreNamed) {
  MemoryStore store;
  auto wrong = options_of(1, 2, kRejoin);
  wrong.chunk_bytes = 4096;
  auto other = begin_to_join(store, wrong);
  const auto found = join(store, options_of(0, 2, kRejoin));
  EXPECT_EQ(found.status().code(), ErrorCode::mismatch);
  EXPECT_TRUE(contains(found.status(), "disagree on chunk_bytes")) << found.status().message();
  EXPECT_EQ(other.get().status().code(), ErrorCode::mismatch);
}

TEST_IN_VIRTUAL_TIME(Rejoin, JobsOfOneStoreDoNotMeet) {
  MemoryStore store;
  std::vector<Options> all;
  for (const int slot : {0, 1}) {
    for (const char* job : {"a", "b"}) {
      all.push_back(options_of(slot, 2, kRejoin, *job == 'a' ? 4 : 0));
      all.back().job = job;
    }
  }
  const auto found = join_all(store, all);
  EXPECT_EQ(found[0].generation, 5u);
  EXPECT_EQ(found[1].generation, 1u);
  EXPECT_EQ(found[0].roster, found[2].roster);
  EXPECT_NE(found[0].roster, found[1].roster);
}

/// Uses a short window, a sixth of the timeout.
TEST_IN_VIRTUAL_TIME(Shrink, SurvivorsGoOnWithoutTheOthersByTheirOrder) {
  MemoryStore store;
  remember(store, 1);
  const auto begun = Clock::now();
  const auto found = join_all(store, {shrinking(1, 4, 1), shrinking(3, 4, 1)});
  EXPECT_LT(Clock::now() - begun, milliseconds(700));
  EXPECT_EQ(found[0].generation, 2u);
  EXPECT_EQ(found[0].rank, 0);
  EXPECT_EQ(found[1].rank, 1);
  EXPECT_EQ(slots_of(found[0]), (std::vector{1, 3}));
}

TEST_IN_VIRTUAL_TIME(Shrink, ToOneAndGrowAgain) {
  MemoryStore store;
  remember(store, 1);
  const auto alone = join(store, shrinking(2, 3, 1));
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  EXPECT_EQ(slots_of(alone.value()), std::vector{2});
  auto newcomer = begin_to_join(store, shrinking(0, 3));
  while (generation_wanted(*store.open(), "default") < 3) pause_for(milliseconds(2));
  const auto again = join(store, shrinking(2, 3, 2));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again.value().generation, 3u);
  EXPECT_EQ(again.value().rank, 1);
  EXPECT_EQ(slots_of(again.value()), (std::vector{0, 2}));
  EXPECT_FALSE(again.value().joining);
  EXPECT_TRUE(newcomer.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Shrink, FewerThanMinWorkersWaitForMore) {
  MemoryStore store;
  remember(store, 1);
  auto all = std::vector{shrinking(0, 3, 1), shrinking(1, 3, 1)};
  for (Options& options : all) options.min_workers = 3;
  auto late = shrinking(2, 3, 1);
  late.min_workers = 3;
  auto first = begin_to_join(store, all[0]);
  auto second = begin_to_join(store, all[1]);
  pause_for(milliseconds(400));
  EXPECT_EQ(join(store, late).value().members.size(), 3u);
  EXPECT_EQ(first.get().value().members.size(), 3u);
  EXPECT_EQ(second.get().value().generation, 2u);
  all[1].generation = 2;
  EXPECT_TRUE(contains(join(store, all[1]).status(), "no fewer than 3"));
}

TEST_IN_VIRTUAL_TIME(Shrink, AJobThatBeginsWaitsForAll) {
  MemoryStore store;
  auto first = begin_to_join(store, shrinking(0, 2));
  pause_for(milliseconds(400));  // three windows
  const auto second = join(store, shrinking(1, 2));
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_EQ(second.value().generation, 1u);
  EXPECT_EQ(first.get().value().members.size(), 2u);
}

TEST_IN_VIRTUAL_TIME(Shrink, WhoComesTooLateIsInTheNextGeneration) {
  MemoryStore store;
  remember(store, 1);
  const auto others = join_all(store, {shrinking(0, 3, 1), shrinking(1, 3, 1)});
  EXPECT_EQ(others[0].members.size(), 2u);
  auto late = begin_to_join(store, shrinking(2, 3, 1));
  while (generation_wanted(*store.open(), "default") < 3) pause_for(milliseconds(2));
  const auto found = join_all(store, {shrinking(0, 3, 2), shrinking(1, 3, 2)});
  EXPECT_EQ(found[1].members.size(), 3u);
  EXPECT_FALSE(late.get().value().joining) << "it is a survivor, if of an older generation";
}

TEST_IN_VIRTUAL_TIME(Shrink, WhoComesTooLateWaitsForTheStepOfTheOthers) {
  MemoryStore store;
  remember(store, 1);
  const auto alone = join(store, shrinking(0, 3, 1));
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  auto late = begin_to_join(store, shrinking(2, 3, 1));
  auto newcomer = begin_to_join(store, shrinking(1, 3));
  pause_for(milliseconds(300));  // more than two windows
  const auto found = join(store, shrinking(0, 3, 2));
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found.value().generation, 3u) << "no generation was formed in the meantime";
  EXPECT_EQ(slots_of(found.value()), (std::vector{0, 1, 2}));
  EXPECT_EQ(late.get().value().generation, 3u);
  EXPECT_TRUE(newcomer.get().value().joining);
}

TEST_IN_VIRTUAL_TIME(Shrink, WhoComesTooLateGoesOnOnceTheOthersHaveDied) {
  MemoryStore store;
  remember(store, 1);
  ASSERT_TRUE(join(store, shrinking(0, 3, 1)).ok());
  const auto begun = Clock::now();
  const auto late = join_all(store, {shrinking(1, 3, 1), shrinking(2, 3, 1)});
  EXPECT_GE(Clock::now() - begun, milliseconds(400)) << "half of the timeout";
  EXPECT_EQ(slots_of(late[0]), (std::vector{1, 2}));
  EXPECT_EQ(slots_of(late[1]), (std::vector{1, 2}));
}

TEST_IN_VIRTUAL_TIME(Shrink, AReplacementSaysThatTheOthersHaveDied) {
  MemoryStore store;
  remember(store, 1);
  ASSERT_TRUE(join(store, shrinking(0, 3, 1)).ok());
  const auto begun = Clock::now();
  const auto found = join_all(store, {shrinking(0, 3), shrinking(1, 3, 1)});
  EXPECT_LT(Clock::now() - begun, milliseconds(400)) << "half of the timeout";
  EXPECT_EQ(slots_of(found[1]), (std::vector{0, 1}));
  EXPECT_TRUE(found[0].joining);
}

TEST_IN_VIRTUAL_TIME(Shrink, WhoWasToLeadAndDiedHoldsNobodyUp) {
  MemoryStore store;
  remember(store, 1);
  auto dying = shrinking(0, 3, 1);
  dying.timeout = milliseconds(50);
  // Long enough for its entry to be seen, but too short to write the roster.
  const auto view = store.open(9);
  EXPECT_FALSE(meet(*view, dying, {}, always).ok());
  EXPECT_TRUE(store.has(member_key("default", 0)));
  auto patient = std::vector{options_of(1, 3, kShrink, 1), options_of(2, 3, kShrink, 1)};
  for (Options& options : patient) options.timeout = milliseconds(1500);
  const auto found = join_all(store, patient);
  EXPECT_EQ(found[0].generation, 3u);
  EXPECT_EQ(slots_of(found[0]), (std::vector{1, 2}));
}

/// Several processes that form one generation after the other. Some die after a random number of requests to the store,
/// and each of these is replaced by a new one.
class Crowd {
 public:
  Crowd(int slot_count, OnFailure on_failure, std::uint64_t seed, int deaths)
      : slot_count_(slot_count), on_failure_(on_failure), deaths_left_(deaths), random_(seed) {}

  void run() {
    run_ranks(slot_count_, [this](int slot) { live(slot); });
  }

  /// The members of each generation that all have joined.
  std::map<std::uint32_t, std::set<std::string>> rosters;

 private:
  /// Runs the processes of one slot, until a whole membership has connected.
  void live(int slot) {
    for (;;) {
      const auto store = store_.open(requests_to_live());
      Options options = options_of(slot, slot_count_, on_failure_);
      options.timeout = milliseconds(4000);
      for (std::uint32_t at_least = 1;;) {
        const auto met = meet(
            *store, options, {}, [&store] { return store->alive(); }, at_least);
        if (!met.ok()) break;  // it is dead
        if (connects(*store, options, met.value())) return;
        at_least = met.value().generation + 1;
      }
    }
  }

  int requests_to_live() {
    const std::lock_guard lock(mutex_);
    if (deaths_left_ == 0) return -1;
    --deaths_left_;
    return std::uniform_int_distribution(1, 60)(random_);
  }

  /// Waits for the others while the membership is valid, as Client::connect does.
  bool connects(MemoryStore::View& store, const Options& options, const Membership& membership) {
    for (;; pause_for(milliseconds(2))) {
      const bool goes_on = stands(store, options.job, membership) && store.alive();
      const std::lock_guard lock(mutex_);
      auto& connected = connected_[membership.roster];
      rosters[membership.generation].insert(membership.roster);
      if (goes_on) connected.insert(membership.rank);
      if (connected.size() == membership.members.size()) return true;
      if (goes_on) continue;
      connected.erase(membership.rank);
      return false;
    }
  }

  const int slot_count_;
  const OnFailure on_failure_;
  MemoryStore store_;
  std::mutex mutex_;  // of the rest, and of rosters
  int deaths_left_;
  std::mt19937_64 random_;
  std::map<std::string, std::set<int>> connected_;  // ranks, by roster
};

TEST_IN_VIRTUAL_TIME(Crowd, MeetsWhoeverDiesOnTheWay) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Crowd crowd(2 + static_cast<int>(seed % 4), kRejoin, seed, 20);
    const auto begun = Clock::now();
    crowd.run();
    EXPECT_LT(Clock::now() - begun, std::chrono::seconds(10)) << "seed " << seed;
    for (const auto& [generation, rosters] : crowd.rosters)
      EXPECT_EQ(rosters.size(), 1u) << "generation " << generation << " with seed " << seed;
    EXPECT_EQ(parse_roster(*crowd.rosters.rbegin()->second.begin()).places.size(), 2 + seed % 4);
  }
}

TEST(Published, ARosterThatIsNoneIsEmpty) {
  const Roster roster{7, {{0, "ab"}, {3, "cd"}}};
  EXPECT_EQ(parse_roster(to_text(roster)).generation, 7u);
  EXPECT_EQ(parse_roster(to_text(roster)).places, roster.places);
  for (const char* text : {"", "1", "1,0", "1,0:a,x:b", "1,1:a,0:b", "1,1:a,1:b", "1,99999999999:a", "x,0:a"})
    EXPECT_EQ(parse_roster(text).generation, 0u) << text;
}

TEST(Published, AnEntryIsReadAsItWasWritten) {
  const Entry entry{
      9, "nonce", "facts", {"host id", {"a:1", "a:2"}, "a:3", {"b"}, "c", "node-1", "rack-1", 5, 4'000'000'000}};
  const Entry read = parse_entry(to_text(entry, shared_facts(Options())));
  EXPECT_EQ(read.generation, 9u);
  EXPECT_EQ(read.nonce, "nonce");
  EXPECT_EQ(read.facts, "facts");
  EXPECT_EQ(read.member.server_addresses, entry.member.server_addresses);
  EXPECT_EQ(read.member.host_name, "node-1");
  EXPECT_EQ(read.member.slot, 5);
  EXPECT_EQ(read.member.last_generation, 4'000'000'000u);
  EXPECT_EQ(parse_entry("garbage").generation, 0u);
}

}  // namespace
}  // namespace poseidon
