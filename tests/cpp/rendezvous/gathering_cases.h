// Processes of a job that meet in a store in memory.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "cpp/rendezvous/memory_store.h"
#include "cpp/rendezvous/ports.h"
#include "rendezvous/members.h"
#include "rendezvous/published.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {

inline Options options_of(int slot, int slot_count, OnFailure on_failure, std::uint32_t last = 0) {
  Options options;
  options.rank = slot;
  options.world_size = slot_count;
  options.on_failure = on_failure;
  options.generation = last;
  options.run = "a run";
  options.timeout = std::chrono::seconds(20);
  return options;
}

inline Result<Membership> join(MemoryStore& store, const Options& options, std::uint32_t at_least = 1) {
  Member mine;
  mine.peer_address = "slot " + std::to_string(options.rank);
  return meet(*store.open(), options, mine, always, at_least);
}

/// The store has been there in earlier generations.
inline void remember(MemoryStore& store, std::uint32_t generation) {
  ASSERT_TRUE(store.open()->set(generation_key("default"), std::to_string(generation)).ok());
}

inline Beside<Result<Membership>> begin_to_join(MemoryStore& store, const Options& options,
                                                std::uint32_t at_least = 1) {
  return run_beside([&store, options, at_least] { return join(store, options, at_least); });
}

/// Runs all of these at the same time. Each must join.
inline std::vector<Membership> join_all(MemoryStore& store, const std::vector<Options>& all) {
  std::vector<Membership> found(all.size());
  run_ranks(static_cast<int>(all.size()), [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    auto joined = join(store, all[index]);
    ASSERT_TRUE(joined.ok()) << joined.status().message();
    found[index] = std::move(joined.value());
  });
  return found;
}

inline std::vector<int> slots_of(const Membership& membership) {
  std::vector<int> slots;
  for (const Member& member : membership.members) slots.push_back(member.slot);
  return slots;
}

/// With a window of 133 ms.
inline Options shrinking(int slot, int slot_count, std::uint32_t last = 0) {
  Options options = options_of(slot, slot_count, kShrink, last);
  options.timeout = std::chrono::milliseconds(800);
  return options;
}

}  // namespace poseidon::testing
