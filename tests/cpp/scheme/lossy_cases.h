// What the tests of lossy schemes share: gradients of several steps, and the residual of each rank beside them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/plan.h"
#include "wire/header.h"

namespace poseidon::testing {

using Floats = std::vector<float>;

inline Floats random_floats(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> values;
  Floats floats(count);
  for (float& value : floats) value = values(random);
  return floats;
}

inline Floats floats_of(std::span<const std::byte> bytes) {
  Floats floats(bytes.size() / sizeof(float));
  if (!floats.empty()) std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// What each rank contributes; empty: nothing.
using Step = std::vector<std::optional<Floats>>;

/// One rank's compression, computed slowly: returns what the rank adds to the sum, and changes its residual.
using SlowCompression = std::function<Floats(const Floats& gradient, Floats& residual)>;

/// What becomes of the mean on its way back, computed slowly.
using SlowReturn = std::function<Floats(const Floats& mean)>;

/// A layer of one lossy scheme or wire format in a cluster, beside a slow computation.
class LossyJob {
 public:
  LossyJob(std::size_t worker_count, const Layer& layer, SlowCompression compress, SlowReturn bring_back = nullptr)
      : cluster_(over_tcp(worker_count)),
        layer_(layer),
        id_(cluster_.add({layer})),
        compress_(std::move(compress)),
        bring_back_(std::move(bring_back)),
        residuals_(worker_count, Floats(layer.element_count)) {}

  /// Makes one step, and compares bits: the results with the sum in rank order, and the residuals.
  void expect_step(const Step& step, std::uint32_t divisor) {
    const std::optional<Floats> expected = slow_step(step, divisor);
    const Floats before(layer_.element_count, 5);
    std::vector<Floats> results(step.size());
    cluster_.each([&](std::size_t rank, Client& client) {
      EXPECT_EQ(client.next_scheme(id_), layer_.scheme);
      Floats& memory = results[rank] = step[rank].value_or(before);
      Status status = step[rank] ? client.start(id_, bytes_of(memory), divisor)
                                 : client.start_absent(id_, bytes_of(memory), divisor);
      EXPECT_TRUE(status.ok()) << status.message();
      status = client.wait(id_, always);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(client.layer_stats(id_).present, expected.has_value());
    });
    for (std::size_t rank = 0; rank < step.size(); ++rank) {
      EXPECT_TRUE(same_bits(results[rank], expected.value_or(before))) << "rank " << rank;
      const Floats residual = floats_of(client(rank).residual(id_));
      if (!residual.empty()) EXPECT_TRUE(same_bits(residual, residuals_[rank])) << "rank " << rank;
    }
  }

  Client& client(std::size_t rank) { return *cluster_.clients[rank]; }
  TestCluster& cluster() { return cluster_; }
  std::uint32_t id() const { return id_; }
  std::vector<Floats>& residuals() { return residuals_; }

  /// The layers of a test are not kept exact for being small. Shared memory would not count as network traffic.
  static std::vector<Options> over_tcp(std::size_t worker_count) {
    auto options = cluster_options(static_cast<int>(worker_count));
    for (Options& one : options) {
      one.transport = Medium::tcp;
      one.small_bytes = 0;
    }
    return options;
  }

 private:
  std::optional<Floats> slow_step(const Step& step, std::uint32_t divisor) {
    std::optional<Floats> sum;
    for (std::size_t rank = 0; rank < step.size(); ++rank) {
      if (!step[rank]) continue;
      if (!sum) sum.emplace(layer_.element_count, 0.0F);
      const Floats part = compress_(*step[rank], residuals_[rank]);
      for (std::size_t i = 0; i < part.size(); ++i) (*sum)[i] += part[i];
    }
    if (sum)
      for (float& value : *sum) value /= static_cast<float>(divisor);
    if (sum && bring_back_) sum = bring_back_(*sum);
    return sum;
  }

  TestCluster cluster_;
  Layer layer_;
  std::uint32_t id_;
  SlowCompression compress_;
  SlowReturn bring_back_;
  std::vector<Floats> residuals_;
};

/// Steps with absent ranks, with ranks that are all absent, and with divisors of all kinds.
inline void expect_random_steps(LossyJob& job, std::size_t worker_count, std::size_t element_count, int step_count) {
  std::mt19937 random(static_cast<unsigned>(element_count));
  for (int number = 0; number < step_count; ++number) {
    Step step(worker_count);
    for (auto& one : step)
      if (random() % 4 != 0 && number != 3) one = random_floats(random, element_count);
    job.expect_step(step, 1 + static_cast<std::uint32_t>(random() % 5));
  }
}

}  // namespace poseidon::testing
