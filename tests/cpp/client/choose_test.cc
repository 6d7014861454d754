// Client::choose: which scheme a layer takes, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "cpp/client/cluster.h"

namespace poseidon::testing {
namespace {

/// Two float32 matrices of 64 × 64 on four workers: sfb pays up to K = 16. `small_bytes` may make them one group.
class Choose : public ::testing::Test {
 protected:
  static constexpr std::size_t kSize = 64;
  static constexpr std::uint64_t kRows = 4;

  explicit Choose(std::size_t small_bytes = 0) : options_(cluster_options(4)) {
    for (auto& options : options_) options.small_bytes = small_bytes;
    cluster_ = std::make_unique<TestCluster>(options_);
    first_ = cluster_->add({matrix_layer("first", kSize, kSize), matrix_layer("second", kSize, kSize)});
    cluster_->each([this](std::size_t, Client& client) {
      for (const auto layer : {first_, first_ + 1}) client.set_factor_count(layer, 4 * kRows);
    });
  }

  /// Exchanges the same ones on both layers, as factors if the scheme takes them, and returns the first result.
  std::vector<float> exchange(Client& client) const {
    const std::vector<float> rows(kRows * kSize, 1.0F);
    std::vector<std::vector<float>> results(2, std::vector<float>(kSize * kSize, static_cast<float>(kRows)));
    for (const std::uint32_t i : {0U, 1U}) {
      const auto place = bytes_of(results[i]);
      const std::byte* factors = std::as_bytes(std::span(rows)).data();
      const Status started =
          traits_of(client.next_scheme(first_ + i)).takes_factors
              ? client.start_factors(first_ + i, DType::float32, {{factors, factors, kRows}}, place, 1, false)
              : client.start(first_ + i, place, 1, kRows);
      EXPECT_TRUE(started.ok()) << started.message();
    }
    const Status waited = client.wait_all(always);
    EXPECT_TRUE(waited.ok()) << waited.message();
    return results.front();
  }

  std::vector<Options> options_;
  std::unique_ptr<TestCluster> cluster_;
  std::uint32_t first_ = 0;
};

TEST_F(Choose, TheSchemeHoldsFromTheNextStartUntilItIsWithdrawn) {
  const std::vector<float> expected(kSize * kSize, 16.0F);
  cluster_->each([&](std::size_t, Client& client) {
    EXPECT_EQ(client.next_scheme(first_), Scheme::sfb);
    EXPECT_TRUE(client.choose(first_, {Scheme::ps, kRows}).ok());
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(client.next_scheme(first_), Scheme::ps);
      EXPECT_EQ(exchange(client), expected);
      EXPECT_EQ(client.layer_stats(first_).scheme, Scheme::ps);
      EXPECT_EQ(client.layer_stats(first_).compute_ns, 0);
      EXPECT_EQ(client.layer_stats(first_ + 1).scheme, Scheme::sfb) << "it was not chosen for";
      EXPECT_GT(client.layer_stats(first_ + 1).compute_ns, 0);
    }
    EXPECT_TRUE(client.choose(first_, {}).ok());
    EXPECT_EQ(client.next_scheme(first_), Scheme::sfb);
    EXPECT_EQ(exchange(client), expected);
  });
}

TEST_F(Choose, AnotherFactorCountGivesTheCheapestAgain) {
  cluster_->each([&](std::size_t, Client& client) {
    EXPECT_TRUE(client.choose(first_, {Scheme::ps, 9}).ok());
    EXPECT_EQ(client.next_scheme(first_), Scheme::sfb) << "4 rows are less than half of 9";
    client.set_factor_count(first_, 4 * 8);
    EXPECT_EQ(client.next_scheme(first_), Scheme::ps);
    client.set_factor_count(first_, kNotFactorable);
    EXPECT_EQ(client.next_scheme(first_), Scheme::ps);
    EXPECT_TRUE(client.choose(first_, {Scheme::sfb, 9}).ok());
    EXPECT_EQ(client.next_scheme(first_), Scheme::ps) << "a dense gradient has no factors";
  });
}

TEST_F(Choose, APsInsteadOfALossySchemeHoldsForEveryFactorCountAndTheResidualWaits) {
  Layer lossy = matrix_layer("lossy", kSize, kSize);
  lossy.scheme = Scheme::topk;
  lossy.compression.topk_fraction = 0.25;
  const std::uint32_t id = cluster_->add({lossy});
  cluster_->each([&](std::size_t, Client& client) {
    const auto sum_of_ones = [&](std::size_t count) {
      std::vector<float> values(kSize * kSize, 1.0F);
      EXPECT_TRUE(client.start(id, bytes_of(values), 1, kRows).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_EQ(std::ranges::count(values, 4.0F), static_cast<std::ptrdiff_t>(count));
    };
    EXPECT_EQ(client.choose(id, {Scheme::sfb, kRows}).code(), ErrorCode::invalid_argument);
    sum_of_ones(kSize * kSize / 4);
    const auto residual = client.residual(id);
    const std::vector<std::byte> kept(residual.begin(), residual.end());
    EXPECT_TRUE(client.choose(id, {Scheme::ps, 0}).ok());
    EXPECT_EQ(client.next_scheme(id), Scheme::ps);
    sum_of_ones(kSize * kSize);
    sum_of_ones(kSize * kSize);
    EXPECT_TRUE(std::ranges::equal(client.residual(id), kept));
    EXPECT_TRUE(client.choose(id, {}).ok());
    EXPECT_EQ(client.next_scheme(id), Scheme::topk);
  });
}

TEST_F(Choose, WhatTheLayerCannotTakeIsRefused) {
  cluster_->each([&](std::size_t, Client& client) {
    for (const Scheme scheme : {Scheme::project_adam, Scheme::rows, Scheme::local})
      EXPECT_EQ(client.choose(first_, {scheme, kRows}).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(client.choose(first_ + 2, {Scheme::ps, kRows}).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(client.next_scheme(first_), Scheme::sfb);
    exchange(client);
  });
}

TEST_F(Choose, RanksThatChooseDifferentlyEndInAMismatchOnAll) {
  cluster_->each([&](std::size_t rank, Client& client) {
    if (rank == 1) EXPECT_TRUE(client.choose(first_, {Scheme::ps, kRows}).ok());
    const std::vector<float> rows(kRows * kSize, 1.0F);
    const std::byte* factors = std::as_bytes(std::span(rows)).data();
    std::vector<float> result(kSize * kSize, static_cast<float>(kRows));
    if (rank == 1)
      EXPECT_TRUE(client.start(first_, bytes_of(result), 1, kRows).ok());
    else
      static_cast<void>(
          client.start_factors(first_, DType::float32, {{factors, factors, kRows}}, bytes_of(result), 1, false));
    const Status status = client.wait_all(always);
    EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
  });
}

class ChooseInAGroup : public Choose {
 protected:
  ChooseInAGroup() : Choose(kSize * kSize * sizeof(float)) {}
};

TEST_F(ChooseInAGroup, IsRefused) {
  cluster_->each([&](std::size_t, Client& client) {
    EXPECT_EQ(client.choose(first_, {Scheme::sfb, kRows}).code(), ErrorCode::invalid_argument);
    EXPECT_EQ(client.next_scheme(first_), Scheme::ps);
  });
}

}  // namespace
}  // namespace poseidon::testing
