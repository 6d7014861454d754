// LevelQueue compared with a stable sort by level.
#include "transport/level_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace poseidon {
namespace {

struct Item {
  std::uint16_t level = 0;
  int number = 0;
  bool operator==(const Item&) const = default;
};

std::vector<Item> visited(const LevelQueue<Item>& queue, std::size_t at_most = ~std::size_t{0}) {
  std::vector<Item> items;
  queue.visit([&](const Item& item) {
    items.push_back(item);
    return items.size() < at_most;
  });
  return items;
}

std::vector<Item> popped(LevelQueue<Item>& queue) {
  std::vector<Item> items;
  while (!queue.empty()) items.push_back(queue.pop());
  return items;
}

TEST(LevelQueue, LowerLevelsComeFirstAndEqualOnesStayInOrder) {
  LevelQueue<Item> queue;
  EXPECT_TRUE(queue.empty());
  const std::vector<Item> pushed{{7, 0}, {1023, 1}, {0, 2}, {7, 3}, {64, 4}, {63, 5}, {0, 6}, {7, 7}};
  for (const Item& item : pushed) queue.push(item.level, item);
  EXPECT_FALSE(queue.empty());
  const std::vector<Item> expected{{0, 2}, {0, 6}, {7, 0}, {7, 3}, {7, 7}, {63, 5}, {64, 4}, {1023, 1}};
  EXPECT_EQ(visited(queue), expected);
  EXPECT_EQ(popped(queue), expected);
  EXPECT_TRUE(queue.empty());
  EXPECT_TRUE(visited(queue).empty());
}

TEST(LevelQueue, WhatComesLaterOvertakesWhatWaits) {
  LevelQueue<Item> queue;
  queue.push(500, {500, 0});
  queue.push(500, {500, 1});
  EXPECT_EQ(queue.pop(), (Item{500, 0}));
  queue.push(499, {499, 2});
  EXPECT_EQ(queue.pop(), (Item{499, 2}));
  EXPECT_EQ(queue.pop(), (Item{500, 1}));
}

TEST(LevelQueue, HasEveryLevel) {
  LevelQueue<Item> queue;
  for (int level = wire::kPriorityLevels - 1; level >= 0; --level)
    queue.push(static_cast<std::uint16_t>(level), {static_cast<std::uint16_t>(level), level});
  const auto items = popped(queue);
  ASSERT_EQ(items.size(), std::size_t{wire::kPriorityLevels});
  for (std::size_t level = 0; level < items.size(); ++level) ASSERT_EQ(items[level].level, level);
}

TEST(LevelQueue, AVisitMayEndEarly) {
  LevelQueue<Item> queue;
  for (int i = 0; i < 10; ++i) queue.push(static_cast<std::uint16_t>(900 - i * 90), {0, i});
  for (std::size_t count = 1; count <= 10; ++count) EXPECT_EQ(visited(queue, count).size(), count);
}

TEST(LevelQueue, HoldsValuesThatOnlyMoveAndLetsGoOfWhatItGave) {
  LevelQueue<std::shared_ptr<int>> shared;
  const auto value = std::make_shared<int>(3);
  shared.push(5, value);
  EXPECT_EQ(value.use_count(), 2);
  EXPECT_EQ(*shared.pop(), 3);
  EXPECT_EQ(value.use_count(), 1) << "a free place still holds what was in it";
  LevelQueue<std::unique_ptr<int>> unique;
  unique.push(9, std::make_unique<int>(1));
  unique.push(8, std::make_unique<int>(2));
  EXPECT_EQ(*unique.pop(), 2);
  EXPECT_EQ(*unique.pop(), 1);
}

/// Counts the objects that exist.
struct Counted {
  Counted() { ++alive; }
  Counted(const Counted&) { ++alive; }
  Counted& operator=(const Counted&) = default;
  ~Counted() { --alive; }
  static inline int alive = 0;
};

TEST(LevelQueue, UsesThePlacesOfWhatHasGoneAgain) {
  std::mt19937 random(4);
  LevelQueue<Counted> queue;
  for (int i = 0; i < 5; ++i) queue.push(static_cast<std::uint16_t>(i), {});
  for (int i = 0; i < 10'000; ++i) {
    queue.pop();
    queue.push(static_cast<std::uint16_t>(random() % wire::kPriorityLevels), {});
  }
  EXPECT_EQ(Counted::alive, 5) << "as many places as ever waited at once";
  while (!queue.empty()) queue.pop();
  EXPECT_TRUE(queue.empty());
}

/// The levels from which a round of the random test draws: all, a few, or the first and last of each word of bits.
std::uint16_t random_level(std::mt19937& random, int round) {
  static constexpr std::uint16_t kEdges[] = {0, 1, 62, 63, 64, 65, 127, 128, 511, 512, 959, 960, 1022, 1023};
  if (round % 3 == 0) return static_cast<std::uint16_t>(random() % wire::kPriorityLevels);
  return round % 3 == 1 ? static_cast<std::uint16_t>(random() % 3) : kEdges[random() % std::size(kEdges)];
}

TEST(LevelQueue, RandomPushesAndPopsGiveWhatAStableSortGives) {
  std::mt19937 random(12);
  for (int round = 0; round < 30; ++round) {
    LevelQueue<Item> queue;
    std::multimap<std::uint16_t, Item> model;  // equal keys keep the order in which they came
    for (int operation = 0; operation < 2000; ++operation) {
      if (random() % 9 < 5 || model.empty()) {
        const Item item{random_level(random, round), operation};
        queue.push(item.level, item);
        model.emplace(item.level, item);
      } else {
        ASSERT_EQ(queue.pop(), model.begin()->second);
        model.erase(model.begin());
      }
      ASSERT_EQ(queue.empty(), model.empty());
      if (operation % 200 != 0) continue;
      std::vector<Item> expected;
      for (const auto& [level, item] : model) expected.push_back(item);
      ASSERT_EQ(visited(queue), expected) << "a visit shows what pops would give";
    }
    std::vector<Item> expected;
    for (const auto& [level, item] : model) expected.push_back(item);
    ASSERT_EQ(popped(queue), expected);
  }
}

}  // namespace
}  // namespace poseidon
