// Error feedback of wire formats: the bits of results and residuals over several steps, and values that are not finite.
#include <cmath>
#include <limits>

#include "cpp/scheme/lossy_cases.h"
#include "kernel/kernel.h"

namespace poseidon::testing {
namespace {

constexpr WireFormat kFormats[] = {WireFormat::bf16, WireFormat::fp16, WireFormat::int8};

Layer rounded_layer(WireFormat wire, std::size_t element_count) {
  Layer layer = vector_layer("layer", element_count, DType::float32, Scheme::ps);
  layer.wire = wire;
  layer.whole = true;  // so that blocks of int8 begin where the layer does
  layer.compression.error_feedback = true;
  return layer;
}

Floats rounded(WireFormat wire, const Floats& values) {
  const DType dtype = wire_dtype(wire, DType::float32);
  std::vector<std::byte> encoded(array_bytes(dtype, values.size()));
  Floats decoded(values.size());
  kernel::encode(dtype, values.data(), encoded.data(), values.size());
  kernel::decode(dtype, encoded.data(), decoded.data(), values.size());
  return decoded;
}

SlowCompression slow_rounding(WireFormat wire) {
  return [wire](const Floats& gradient, Floats& residual) {
    Floats wanted(gradient.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = gradient[i] + residual[i];
    Floats sent = rounded(wire, wanted);
    for (std::size_t i = 0; i < wanted.size(); ++i) residual[i] = wanted[i] - sent[i];
    return sent;
  };
}

LossyJob job_of(std::size_t worker_count, WireFormat wire, std::size_t element_count) {
  return {worker_count, rounded_layer(wire, element_count), slow_rounding(wire),
          [wire](const Floats& sum) { return rounded(wire, sum); }};
}

TEST(ErrorFeedback, HasTheBitsOfTheSlowComputationOverManySteps) {
  for (const WireFormat wire : kFormats)
    for (const std::size_t size : {1, 255, 1000, 70'000}) {
      LossyJob job = job_of(3, wire, size);
      expect_random_steps(job, 3, size, 8);
    }
}

TEST(ErrorFeedback, WhatIsRoundedOffArrives) {
  for (const WireFormat wire : kFormats) {
    Layer layer = rounded_layer(wire, 300);
    TestCluster cluster(LossyJob::over_tcp(2));
    const std::uint32_t id = cluster.add({layer});
    cluster.each([&](std::size_t, Client& client) {
      double total = 0;
      for (int step = 0; step < 400; ++step) {
        Floats memory(300, 1.0F);
        memory[0] = 1e-3F;  // less than half of what int8 can send beside 1
        ASSERT_TRUE(client.start(id, bytes_of(memory), 2).ok());
        ASSERT_TRUE(client.wait(id, always).ok());
        total += memory[0];
      }
      EXPECT_NEAR(total, 0.4, 0.01) << "wire format " << static_cast<int>(wire);
    });
  }
}

TEST(ErrorFeedback, ABadValueReachesEveryRankAndIsGoneInTheNextStep) {
  for (const WireFormat wire : kFormats)
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), std::nanf("")}) {
      LossyJob job = job_of(2, wire, 600);
      std::mt19937 random(5);
      job.expect_step({random_floats(random, 600), random_floats(random, 600)}, 2);
      job.cluster().each([&](std::size_t rank, Client& client) {
        Floats memory(600, 1e-3F);
        if (rank == 1) memory[77] = bad;
        ASSERT_TRUE(client.start(job.id(), bytes_of(memory), 2).ok());
        ASSERT_TRUE(client.wait(job.id(), always).ok());
        EXPECT_FALSE(std::isfinite(memory[77]));
      });
      for (std::size_t rank = 0; rank < 2; ++rank) {
        job.residuals()[rank] = floats_of(job.client(rank).residual(job.id()));
        for (const float kept : job.residuals()[rank]) ASSERT_TRUE(std::isfinite(kept));
      }
      EXPECT_EQ(job.residuals()[1][77], 0.0F);
      job.expect_step({random_floats(random, 600), random_floats(random, 600)}, 2);
    }
}

TEST(ErrorFeedback, LayersOfAGroupTravelAsTheyAre) {
  auto options = LossyJob::over_tcp(2);
  for (auto& one : options) one.small_bytes = 4000;
  TestCluster cluster(options);
  const std::uint32_t first = cluster.add({rounded_layer(WireFormat::bf16, 2000), [] {
                                             Layer small = vector_layer("small", 100, DType::float32, Scheme::ps);
                                             small.wire = WireFormat::int8;
                                             small.compression.error_feedback = true;
                                             return small;
                                           }()});
  const float value = 1.0F + std::ldexp(1.0F, -20);
  cluster.each([&](std::size_t, Client& client) {
    Floats large(2000, value);
    Floats small(100, value);
    ASSERT_TRUE(client.start(first, bytes_of(large), 1).ok());
    ASSERT_TRUE(client.start(first + 1, bytes_of(small), 1).ok());
    ASSERT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(large, Floats(2000, 2.0F));
    EXPECT_EQ(small, Floats(100, 2 * value));
    EXPECT_EQ(floats_of(client.residual(first)), Floats(2000, value - 1));
    EXPECT_TRUE(client.residual(first + 1).empty());
  });
}

}  // namespace
}  // namespace poseidon::testing
