// Results of stored layers as differences from the value that a worker has.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/reference_update.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kCount = 300'000;  // several chunks
constexpr std::size_t kRanks = 2;

/// A job of two ranks, each of which is a server, that trains one stored layer by SGD.
class Differences : public ::testing::Test {
 protected:
  explicit Differences(CodingPolicy coding = CodingPolicy::on) : cluster_(options(coding)) {}

  static std::vector<Options> options(CodingPolicy coding) {
    auto all = cluster_options(kRanks);
    for (Options& one : all) {
      one.coding = coding;
      one.transport = Medium::tcp;
      one.chunk_bytes = 128 << 10;
      one.reduce_by_host = false;
    }
    return all;
  }

  void SetUp() override {
    ASSERT_TRUE(cluster_.connected());
    Layer layer = vector_layer("weights", kCount);
    layer.stored = true;
    layer_ = cluster_.add({layer});
    std::mt19937 random(7);
    std::normal_distribution<float> drawn(0, 0.02F);
    for (float& value : expected_) value = drawn(random);
    cluster_.each([&](std::size_t rank, Client& client) {
      values_[rank] = expected_;
      if (rank == 0) EXPECT_TRUE(client.assign(layer_, bytes_of(expected_)).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_TRUE(client.set_rule(layer_, testing::rule_of("sgd", {{"lr", 1e-4}})).ok());
    });
  }

  /// A step in which every rank has changed its values before, as `change` does. Returns what all have received: the
  /// gradients, which hardly take any bytes, and the results.
  std::uint64_t step(const std::function<void(std::size_t, Floats&)>& change = [](auto, auto&) {}) {
    for (float& value : expected_) value -= 1e-4F * 0.25F;
    const std::uint64_t before = received_bytes();
    cluster_.each([&](std::size_t rank, Client& client) {
      change(rank, values_[rank]);
      Floats gradient(kCount, 0.25F);
      EXPECT_TRUE(client.push_pull(layer_, bytes_of(gradient), bytes_of(values_[rank]), kRanks).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_EQ(values_[rank], expected_) << "rank " << rank;
    });
    return received_bytes() - before;
  }

  std::uint64_t received_bytes() const {
    std::uint64_t sum = 0;
    for (const auto& client : cluster_.clients) sum += client->traffic().bytes_received;
    return sum;
  }

  TestCluster cluster_;
  std::uint32_t layer_ = 0;
  Floats expected_ = Floats(kCount);
  std::array<Floats, kRanks> values_;
};

TEST_F(Differences, TakeFewerBytesThanValues) {
  const auto with_base = step();
  const auto without = step([](std::size_t, Floats& values) { values.assign(kCount, 0); });
  EXPECT_LT(static_cast<double>(with_base), 0.85 * static_cast<double>(without));
}

TEST_F(Differences, OfARankThatHasChangedItsValuesAreWholeValues) {
  const std::vector<std::function<void(Floats&)>> changes{
      [](Floats& values) { values[kCount - 1] = 7; },
      [](Floats& values) { values[0] = -values[0]; },
      [](Floats& values) { std::ranges::reverse(values); },
      [](Floats& values) {
        for (float& value : values) value = std::min(value, 0.025F);
      },
  };
  step();
  for (const auto& change : changes)
    for (std::size_t changing = 0; changing < kRanks; ++changing) {
      step([&](std::size_t rank, Floats& values) {
        if (rank == changing) change(values);
      });
      step();
    }
}

TEST_F(Differences, AreFromWhatTheServersHaveEvenAfterAnAssignment) {
  step();
  for (float& value : expected_) value += 1;
  cluster_.each([&](std::size_t rank, Client& client) {
    if (rank == 0) EXPECT_TRUE(client.assign(layer_, bytes_of(expected_)).ok());
    EXPECT_TRUE(client.wait_all(always).ok());
  });
  step();  // all have the value before the assignment
  step();
}

TEST_F(Differences, FromWhatIsWrittenToMeanwhileAreAskedForAgainAsWholeValues) {
  for (int round = 0; round < 3; ++round) {
    for (float& value : expected_) value -= 1e-4F * 0.25F;
    std::atomic<bool> written = false;
    cluster_.each([&](std::size_t rank, Client& client) {
      Floats gradient(kCount, 0.25F);
      if (rank == 1) EXPECT_TRUE(eventually([&] { return written.load(); }));
      const auto before = client.traffic();
      EXPECT_TRUE(client.push_pull(layer_, bytes_of(gradient), bytes_of(values_[rank]), kRanks).ok());
      if (rank == 0) {
        EXPECT_TRUE(eventually([&] { return client.traffic().plain_bytes_sent > before.plain_bytes_sent + kCount; }));
        for (float& value : values_[0]) value += 1;
        written = true;
      }
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(values_[rank], expected_) << "rank " << rank;
      EXPECT_EQ(client.layer_stats(layer_).factor_count, wire::kUnboundedFactors) << "rank " << rank;
    });
  }
}

}  // namespace
}  // namespace poseidon::testing
