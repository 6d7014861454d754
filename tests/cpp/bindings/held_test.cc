// Arrays of running exchanges stay while other threads start and wait: the address and thread sanitizers see a use of
// memory that was let go of too early.
#include "bindings/held.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpp/client/cluster.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kFloats = 1 << 16;  // no small layer, which would travel in a group
constexpr int kSteps = 100;
constexpr std::uint32_t kLayers = 2;

/// One rank, as src/bindings/client.cc uses its client: a lock, for Python's, guards what is held, and no wait has it.
class HoldingRank {
 public:
  explicit HoldingRank(Client& client) : client_(client) {}

  /// Starts an exchange of an array that nobody else keeps.
  void start(std::uint32_t layer, float value) {
    const auto array = std::make_shared<std::vector<float>>(kFloats, value);
    const std::lock_guard lock(python_);
    const std::uint64_t number = held_.add(layer, array);
    const Status status = client_.start(layer, bytes_of(*array), 1, kNotFactorable);
    EXPECT_TRUE(status.ok()) << status.message();
    held_.release(layer, number - 1);
  }

  void wait(std::uint32_t layer) {
    const std::uint64_t last = held_until_now();
    EXPECT_TRUE(client_.wait(layer, always).ok());
    const std::lock_guard lock(python_);
    held_.release(layer, last);
  }

  void wait_all() {
    const std::uint64_t last = held_until_now();
    EXPECT_TRUE(client_.wait_all(always).ok());
    const std::lock_guard lock(python_);
    held_.release_all(last);
  }

 private:
  std::uint64_t held_until_now() {
    const std::lock_guard lock(python_);
    return held_.last();
  }

  Client& client_;
  std::mutex python_;
  bindings::Held held_;
};

TEST(Held, AWaitForAllKeepsWhatAnotherThreadStartsMeanwhile) {
  TestCluster cluster(cluster_options(2));
  const std::uint32_t first = cluster.add({vector_layer("one", kFloats), vector_layer("other", kFloats)});
  HoldingRank ranks[] = {HoldingRank(*cluster.clients[0]), HoldingRank(*cluster.clients[1])};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (HoldingRank& rank : ranks) {
    for (std::uint32_t layer = first; layer < first + kLayers; ++layer)
      threads.emplace_back([&rank, layer] {
        for (int step = 0; step < kSteps; ++step) {
          rank.start(layer, 1);
          rank.wait(layer);
        }
      });
    threads.emplace_back([&rank, &over] {
      while (!over) rank.wait_all();
    });
  }
  for (const std::size_t training : {0, 1, 3, 4}) threads[training].join();
  over = true;
  for (const std::size_t waiting : {2, 5}) threads[waiting].join();
}

TEST(Held, WhatStartedDuringAWaitStaysUntilItsOwn) {
  bindings::Held held;
  const auto array = [] { return std::make_shared<std::vector<float>>(1); };
  std::weak_ptr<std::vector<float>> before, meanwhile;
  const auto add = [&](std::uint32_t layer) {
    const auto added = array();
    held.add(layer, added);
    return std::weak_ptr(added);
  };
  before = add(0);
  const std::uint64_t last = held.last();
  meanwhile = add(1);
  held.release_all(last);
  EXPECT_TRUE(before.expired());
  EXPECT_FALSE(meanwhile.expired());
  held.release_all(held.last());
  EXPECT_TRUE(meanwhile.expired());
}

}  // namespace
}  // namespace poseidon::testing
