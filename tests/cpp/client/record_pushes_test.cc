// Client::record_pushes: what is kept of past exchanges, and what is not.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/client/cluster.h"

namespace poseidon::testing {
namespace {

class RecordPushes : public ::testing::Test {
 protected:
  RecordPushes() : cluster_(cluster_options(2)) {
    first_ = cluster_.add({matrix_layer("first", 8, 8), matrix_layer("second", 8, 8)});
  }

  void exchange(Client& client, std::uint32_t count) const {
    for (std::uint32_t step = 0; step < count; ++step) {
      std::vector<std::vector<float>> gradients(2, std::vector<float>(64, 1.0F));
      for (const std::uint32_t i : {0U, 1U})
        EXPECT_TRUE(client.start(first_ + i, bytes_of(gradients[i]), 1, kNotFactorable).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
    }
  }

  TestCluster cluster_;
  std::uint32_t first_ = 0;
};

TEST_F(RecordPushes, TheStepsThatWereAskedForAreKeptInOrderForEveryLayer) {
  cluster_.each([&](std::size_t, Client& client) {
    exchange(client, 1);
    EXPECT_TRUE(client.recorded_pushes(first_).empty()) << "nobody has asked";
    client.record_pushes(3, 2);
    exchange(client, 5);
    for (const auto layer : {first_, first_ + 1}) {
      const std::vector<LayerStats> kept = client.recorded_pushes(layer);
      ASSERT_EQ(kept.size(), 2);
      EXPECT_EQ(kept[0].step, 3);
      EXPECT_EQ(kept[1].step, 4);
      EXPECT_LE(kept[0].completed_ns, kept[1].started_ns);
      EXPECT_GT(kept[0].completed_ns, kept[0].started_ns);
    }
  });
}

TEST_F(RecordPushes, ALaterRequestForgetsTheFirst) {
  cluster_.each([&](std::size_t, Client& client) {
    client.record_pushes(1, 2);
    exchange(client, 2);
    client.record_pushes(4, 1);
    EXPECT_TRUE(client.recorded_pushes(first_).empty());
    exchange(client, 2);
    ASSERT_EQ(client.recorded_pushes(first_).size(), 1);
    EXPECT_EQ(client.recorded_pushes(first_)[0].step, 4);
    EXPECT_TRUE(client.recorded_pushes(first_ + 2).empty()) << "there is no such layer";
  });
}

}  // namespace
}  // namespace poseidon::testing
