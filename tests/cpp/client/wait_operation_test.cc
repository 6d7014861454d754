// Waits for one operation of a layer, whatever starts on the layer or fails afterwards.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/client/cluster.h"

namespace poseidon::testing {
namespace {

using std::chrono_literals::operator""s;

class WaitOperation : public ::testing::Test {
 protected:
  WaitOperation() : cluster_(cluster_options(2)), layer_(0) {
    Layer layer = vector_layer("values", 100);
    layer.stored = true;
    layer_ = cluster_.add({layer});
  }

  /// Starts a push on one rank, and returns its number.
  std::uint64_t push(std::size_t rank) {
    EXPECT_TRUE(client(rank).push(layer_, bytes_of(gradients_[rank]), 1).ok());
    return client(rank).newest_operation(layer_);
  }

  Client& client(std::size_t rank) { return *cluster_.clients[rank]; }

  TestCluster cluster_;
  std::uint32_t layer_;
  std::vector<float> gradients_[2] = {std::vector<float>(100, 1.0F), std::vector<float>(100, 2.0F)};
};

/// Runs `wait(client, keep_waiting)` while one operation ends and the next starts, both while the wait looks around.
template <typename Wait>
void expect_end_beside_the_next(Client& client, const std::function<void()>& end_and_start_next, const Wait& wait) {
  std::promise<void> looks;
  std::promise<void> next_started;
  auto waited = std::async(std::launch::async, [&] {
    return wait(client, [&, told = false]() mutable {
      if (!std::exchange(told, true)) {
        looks.set_value();
        next_started.get_future().wait();
      }
      return true;
    });
  });
  looks.get_future().wait();
  end_and_start_next();
  next_started.set_value();
  EXPECT_EQ(waited.wait_for(5s), std::future_status::ready) << "it waits for the next operation";
}

TEST_F(WaitOperation, IsOverWhenTheNextHasStarted) {
  for (const bool by_number : {true, false}) {
    const std::uint64_t first = push(0);
    const auto go_on = [&] {
      push(1);
      while (!client(0).done(layer_)) std::this_thread::yield();
      EXPECT_EQ(push(0), first + 1);
    };
    expect_end_beside_the_next(client(0), go_on, [&](Client& client, const auto& keep_waiting) {
      return by_number ? client.wait_operation(layer_, first, keep_waiting) : client.wait(layer_, keep_waiting);
    });
    EXPECT_TRUE(client(0).operation_done(layer_, first));
    EXPECT_FALSE(client(0).operation_done(layer_, first + 1));
    EXPECT_TRUE(client(1).wait(layer_, always).ok());
    push(1);
    for (const std::size_t rank : {0, 1}) EXPECT_TRUE(client(rank).wait(layer_, always).ok());
  }
}

TEST_F(WaitOperation, ReturnsWhatBecameOfItEveryTime) {
  EXPECT_EQ(client(0).newest_operation(layer_), 0);
  const std::uint64_t first = push(0);
  push(1);
  for (const std::size_t rank : {0, 1}) EXPECT_TRUE(client(rank).wait(layer_, always).ok());
  const std::uint64_t second = push(0);
  client(1).abort("rank 1 has had enough", false);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(contains(client(0).wait_operation(layer_, second, always), "had enough"));
    EXPECT_TRUE(client(0).wait_operation(layer_, first, always).ok()) << "it had completed before";
    EXPECT_TRUE(client(0).operation_done(layer_, second));
  }
  EXPECT_EQ(client(0).newest_operation(layer_ + 99), 0) << "there is no such layer";
  EXPECT_TRUE(client(0).operation_done(layer_ + 99, 1));
}

}  // namespace
}  // namespace poseidon::testing
