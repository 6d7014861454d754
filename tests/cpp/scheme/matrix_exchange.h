// A layer with a matrix whose gradient may be factors, in a cluster of this process, for the tests of schemes whose
// servers multiply. The expected mean is made in rank order, one operation after the other.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "cpp/client/cluster.h"

namespace poseidon::testing {

using Floats = std::vector<float>;

/// What one rank contributes: lists of factors, a dense gradient, or nothing.
struct MatrixGradient {
  struct Factors {
    std::size_t count = 0;
    Floats left;
    Floats right;
  };
  std::vector<Factors> factors;
  Floats dense;

  std::vector<FactorRows> rows() const {
    std::vector<FactorRows> rows;
    for (const Factors& one : factors)
      rows.push_back(
          {std::as_bytes(std::span(one.left)).data(), std::as_bytes(std::span(one.right)).data(), one.count});
    return rows;
  }
};

class MatrixExchange {
 public:
  using Gradients = std::vector<MatrixGradient>;  // by rank

  static constexpr std::uint32_t kDivisor = 3;

  /// A tensor of more than `chunk_bytes` is cut. Shared memory would not count as network traffic.
  MatrixExchange(Layer layer, int worker_count, std::size_t chunk_bytes)
      : layer_(std::move(layer)), cluster_(over_tcp(worker_count, chunk_bytes)) {
    cluster_.each([&](std::size_t rank, Client& client) {
      auto added = client.add_layers({layer_}, false, always);
      ASSERT_TRUE(added.ok()) << added.status().message();
      if (rank == 0) id_ = added.value().first_layer;
      if (rank == 0) unit_ = added.value().plan.units.front();
    });
  }

  Client& client(std::size_t rank) { return *cluster_.clients[rank]; }
  std::uint32_t id() const { return id_; }
  const Unit& unit() const { return unit_; }

  /// Factors of K = the sum of `counts`, given as one list for each count.
  MatrixGradient factors(const std::vector<std::size_t>& counts) {
    MatrixGradient gradient;
    for (const std::size_t count : counts)
      gradient.factors.push_back({count, random_floats(count * layer_.rows), random_floats(count * layer_.cols)});
    return gradient;
  }
  MatrixGradient dense() { return {{}, random_floats(layer_.element_count)}; }
  static MatrixGradient nothing() { return {}; }

  /// One step. Returns what each rank received.
  std::vector<Floats> exchange(const Gradients& gradients) {
    std::vector<Floats> results(gradients.size());
    cluster_.each([&](std::size_t rank, Client& client) {
      EXPECT_EQ(client.next_scheme(id_), layer_.scheme);
      const MatrixGradient& own = gradients[rank];
      results[rank] = own.dense.empty() ? Floats(layer_.element_count, 7) : own.dense;
      const auto memory = bytes_of(results[rank]);
      Status status = !own.factors.empty()
                          ? client.start_factors(id_, DType::float32, own.rows(), memory, kDivisor, false)
                      : own.dense.empty() ? client.start_absent(id_, memory, kDivisor)
                                          : client.start(id_, memory, kDivisor);
      ASSERT_TRUE(status.ok()) << status.message();
      status = client.wait(id_, always);
      EXPECT_TRUE(status.ok()) << status.message();
    });
    return results;
  }

  /// The mean, as one chain of operations in rank order for each element. `rounded` is applied to what is sent.
  Floats mean_in_rank_order(
      const Gradients& gradients,
      const std::function<float(float)>& rounded = [](float value) { return value; }) const {
    Floats mean(layer_.element_count);
    for (std::size_t row = 0; row < layer_.rows; ++row) {
      for (std::size_t col = 0; col < layer_.cols; ++col) {
        float sum = 0;
        for (const MatrixGradient& one : gradients) {
          if (!one.dense.empty()) sum += rounded(one.dense[row * layer_.cols + col]);
          for (const auto& [count, left, right] : one.factors)
            for (std::size_t k = 0; k < count; ++k)
              sum = std::fma(rounded(left[k * layer_.rows + row]), rounded(right[k * layer_.cols + col]), sum);
        }
        mean[row * layer_.cols + col] = rounded(sum / kDivisor);
      }
    }
    return mean;
  }

  void expect_mean(const Gradients& gradients) {
    const Floats mean = mean_in_rank_order(gradients);
    for (const Floats& result : exchange(gradients)) EXPECT_EQ(result, mean);
  }

 private:
  static std::vector<Options> over_tcp(int worker_count, std::size_t chunk_bytes) {
    auto options = cluster_options(worker_count);
    for (Options& one : options) {
      one.transport = Medium::tcp;
      one.chunk_bytes = chunk_bytes;
      one.small_bytes = 0;  // small layers would stay with ps
    }
    return options;
  }

  Floats random_floats(std::size_t count) {
    std::uniform_real_distribution<float> values(-1, 1);
    Floats floats(count);
    for (float& value : floats) value = values(random_);
    return floats;
  }

  const Layer layer_;
  TestCluster cluster_;
  std::uint32_t id_ = 0;
  Unit unit_;
  std::mt19937 random_{1};
};

}  // namespace poseidon::testing
