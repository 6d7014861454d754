// How ranks meet again in a store that has seen them before, with OnFailure::abort.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/rendezvous/memory_store.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/members.h"
#include "rendezvous/published.h"
#include "rendezvous/tcp_store.h"
#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::MemoryStore;
using testing::run_ranks;
using testing::test_options;

Options options_of(int rank, int world_size) { return test_options(rank, world_size, 1); }

Member listening_at(const std::string& address) {
  Member mine;
  mine.peer_address = address;
  return mine;
}

testing::Beside<Result<Membership>> begin_to_meet(MemoryStore& store, const Options& options,
                                                  const std::string& address,
                                                  const std::function<bool()>& keep_waiting = always) {
  return testing::run_beside([=, &store] { return meet(*store.open(), options, listening_at(address), keep_waiting); });
}

/// The addresses of the members of a meeting, by rank, or its error.
std::string addresses(testing::Beside<Result<Membership>>&& meeting) {
  const auto found = meeting.get();
  if (!found.ok()) return found.status().message();
  std::string text;
  for (const Member& member : found.value().members) text += member.peer_address + " ";
  return text;
}

void wait_for_attempt(MemoryStore& store, std::uint32_t attempt) {
  while (generation_wanted(*store.open(), "default") < attempt) pause_for(milliseconds(1));
}

TEST_IN_VIRTUAL_TIME(Attempts, NobodyMeetsWhatIsLeftOfAnEarlierOne) {
  MemoryStore store;
  for (const std::string attempt : {"first", "second", "third"}) {
    auto early = begin_to_meet(store, options_of(0, 3), attempt + "0");
    pause_for(milliseconds(50));
    EXPECT_FALSE(early.is_done()) << "it has taken an old entry for a new one";
    auto next = begin_to_meet(store, options_of(2, 3), attempt + "2");
    auto last = begin_to_meet(store, options_of(1, 3), attempt + "1");
    for (auto* meeting : {&early, &next, &last})
      EXPECT_EQ(addresses(std::move(*meeting)), attempt + "0 " + attempt + "1 " + attempt + "2 ");
  }
}

TEST_IN_VIRTUAL_TIME(Attempts, ARankThatBeginsAgainTakesThoseThatWaitWithIt) {
  MemoryStore store;
  std::atomic<bool> interrupted = false;
  auto waiting = begin_to_meet(store, options_of(0, 3), "patient");
  auto leaves = begin_to_meet(store, options_of(1, 3), "old", [&] { return !interrupted; });
  while (!store.has(member_key("default", 1))) pause_for(milliseconds(1));
  // A store that answers rank 0 late: it has not seen the failure when the next attempt begins.
  store.set_away(true);
  interrupted = true;
  EXPECT_FALSE(leaves.get().ok());
  store.set_away(false);
  auto again = begin_to_meet(store, options_of(1, 3), "new");
  wait_for_attempt(store, 2);
  auto last = begin_to_meet(store, options_of(2, 3), "late");
  for (auto* meeting : {&waiting, &again, &last}) EXPECT_EQ(addresses(std::move(*meeting)), "patient new late ");
}

TEST_IN_VIRTUAL_TIME(Attempts, AFailureEndsItsOwnForAllAndNoOther) {
  MemoryStore store;
  std::atomic<bool> interrupted = false;
  auto waiting = begin_to_meet(store, options_of(0, 3), "0");
  auto leaves = begin_to_meet(store, options_of(1, 3), "1", [&] { return !interrupted; });
  while (!store.has(member_key("default", 1))) pause_for(milliseconds(1));
  interrupted = true;
  const auto own = leaves.get();
  const auto theirs = waiting.get();
  EXPECT_EQ(theirs.status().code(), ErrorCode::aborted);
  EXPECT_EQ(theirs.status().message(), "rank 1: " + own.status().message());
  // A rank that was joining that attempt is told, too.
  const auto late = begin_to_meet(store, options_of(2, 3), "2").get();
  EXPECT_EQ(late.status().message(), theirs.status().message());
  std::vector<testing::Beside<Result<Membership>>> next;
  for (int rank = 2; rank >= 0; --rank) next.push_back(begin_to_meet(store, options_of(rank, 3), "again"));
  for (auto& meeting : next) EXPECT_EQ(addresses(std::move(meeting)), "again again again ");
}

TEST_IN_VIRTUAL_TIME(Attempts, TheFailureOfAProcessThatWasReplacedIsNone) {
  MemoryStore store;
  const auto view = store.open();
  ASSERT_TRUE(view->set(failure_key("default", 1), to_text(Failure{1, "the nonce of another", "rank 1: broken"})).ok());
  auto first = begin_to_meet(store, options_of(0, 2), "0");
  auto second = begin_to_meet(store, options_of(1, 2), "1");
  EXPECT_EQ(addresses(std::move(first)), "0 1 ");
  EXPECT_EQ(addresses(std::move(second)), "0 1 ");
}

TEST_IN_VIRTUAL_TIME(Attempts, AStoreThatBeginsAnewIsFilledAgain) {
  MemoryStore store;
  auto waiting = begin_to_meet(store, options_of(1, 2), "1");
  while (!store.has(member_key("default", 1))) pause_for(milliseconds(1));
  store.set_away(true);
  store.lose_content();
  pause_for(milliseconds(30));
  store.set_away(false);
  auto first = begin_to_meet(store, options_of(0, 2), "0");
  EXPECT_EQ(addresses(std::move(first)), "0 1 ");
  EXPECT_EQ(addresses(std::move(waiting)), "0 1 ");
}

/// Rank 0 serves the store and gives up, which ends the store. The others wait there and find its next store.
TEST(Attempts, SurviveTheStoreThatRankZeroTakesWithIt) {
  const auto port = testing::free_port();
  const Completion other_begins = Completion::make();
  std::vector<std::string> outcomes(2);
  run_ranks(2, [&](int rank) {
    const Options options = test_options(rank, 2, port);
    const auto try_once = [&](const std::function<bool()>& keep_waiting) {
      const auto store = open_tcp_store(options, keep_waiting);
      if (!store.ok()) return store.status();
      const auto found = meet(*store.value(), options, listening_at(std::to_string(rank)), keep_waiting);
      if (!found.ok()) return found.status();
      // The store ends with rank 0, which is to stay until the other one has met, too.
      (void)store.value()->set("met/" + std::to_string(rank), "1");
      return rank == 0 ? store.value()->get("met/1", milliseconds(5000)).status() : Status();
    };
    Status status;
    if (rank == 0) {
      const auto store = open_tcp_store(options, always).value();  // ends, as that of a process that is killed
      other_begins.wait();
    } else {
      other_begins.complete();
    }
    for (int attempt = 0; attempt < 3 && (attempt == 0 || !status.ok()); ++attempt) status = try_once(always);
    outcomes[static_cast<std::size_t>(rank)] = status.message();
  });
  EXPECT_EQ(outcomes, std::vector<std::string>(2));
}

TEST_IN_VIRTUAL_TIME(Attempts, AStoreThatStaysAwayIsAnErrorBeforeTheTimeout) {
  MemoryStore store;
  Options options = options_of(1, 2);
  options.timeout = std::chrono::seconds(60);
  auto waiting = begin_to_meet(store, options, "1");
  while (!store.has(member_key("default", 1))) pause_for(milliseconds(1));
  store.set_away(true);
  const auto begun = Clock::now();
  EXPECT_EQ(waiting.get().status().code(), ErrorCode::unreachable);
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(25));
}

/// Whether all others have met, too; otherwise a rank cannot connect to them.
bool all_have_met(MemoryStore& store, const Membership& membership) {
  const auto view = store.open();
  const auto key = [&](int rank) { return "met/" + membership.run + "/" + std::to_string(rank); };
  EXPECT_TRUE(view->set(key(membership.rank), "1").ok());
  for (int rank = 0; rank < static_cast<int>(membership.members.size()); ++rank)
    if (!view->get(key(rank), milliseconds(300)).ok()) return false;
  return true;
}

/// Every rank tries until it has joined, each time with another timeout. In the end all are in one meeting.
TEST_IN_VIRTUAL_TIME(Attempts, ACrowdMeets) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    MemoryStore store;
    constexpr int kCount = 6;
    std::vector<std::string> runs(kCount);
    run_ranks(kCount, [&](int rank) {
      std::mt19937 random(seed * 100 + static_cast<unsigned>(rank));
      for (int attempt = 0; attempt < 20; ++attempt) {
        Options options = options_of(rank, kCount);
        options.timeout = milliseconds(attempt < 4 ? std::uniform_int_distribution(20, 120)(random) : 5000);
        pause_for(milliseconds(std::uniform_int_distribution(0, 60)(random)));
        const auto found = meet(*store.open(), options, listening_at(std::to_string(rank)), always);
        if (!found.ok() || !all_have_met(store, found.value())) continue;
        runs[static_cast<std::size_t>(rank)] = found.value().run;
        return;
      }
    });
    EXPECT_EQ(runs, std::vector<std::string>(kCount, runs[0])) << seed;
    EXPECT_FALSE(runs[0].empty()) << seed;
  }
}

}  // namespace
}  // namespace poseidon
