// Workers that share machines: they add up their gradients before the network.
#include "plan/hosts.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

/// One rank for each letter, which names its machine, and its rack if there are racks.
std::vector<Options> on_hosts(const std::string& hosts, const std::string& racks = "") {
  auto all = cluster_options(static_cast<int>(hosts.size()));
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    all[rank].machine = hosts.substr(rank, 1);
    if (!racks.empty()) all[rank].rack = racks.substr(rank, 1);
  }
  return all;
}

/// The network bytes that all workers' exchanges of the layer have sent, after one step in which rank r gives r + 1.
std::uint64_t bytes_of_step(TestCluster& cluster, std::uint32_t layer, std::size_t element_count, bool factors) {
  std::vector<std::uint64_t> bytes(cluster.clients.size());
  const auto workers = cluster.clients.size();
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> gradient(element_count, static_cast<float>(rank + 1));
    const auto side = static_cast<std::size_t>(std::sqrt(element_count));
    const std::vector<float> left(side, static_cast<float>(rank + 1));
    const std::vector<float> right(side, 1.0F);
    const FactorRows rows{reinterpret_cast<const std::byte*>(left.data()),
                          reinterpret_cast<const std::byte*>(right.data()), 1};
    const Status started = factors ? client.start_factors(layer, DType::float32, {rows}, bytes_of(gradient), 1, false)
                                   : client.start(layer, bytes_of(gradient), 1);
    ASSERT_TRUE(started.ok()) << started.message();
    const Status status = client.wait(layer, always);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(gradient, std::vector<float>(element_count, static_cast<float>(workers * (workers + 1) / 2)));
    bytes[rank] = client.layer_stats(layer).bytes_sent;
  });
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

class BytesOfHosts : public ::testing::TestWithParam<Scheme> {};

TEST_P(BytesOfHosts, AreAQuarterWithFourWorkersOnEach) {
  constexpr std::size_t kSide = 512;
  const bool factors = GetParam() == Scheme::sfb;
  const auto bytes_on = [&](const std::string& hosts, bool reduce) {
    auto all = on_hosts(hosts);
    for (auto& options : all) options.reduce_by_host = reduce;
    TestCluster cluster(all);
    EXPECT_TRUE(cluster.connected());
    const auto layer = cluster.add({matrix_layer("layer", kSide, kSide, GetParam())});
    return bytes_of_step(cluster, layer, kSide * kSide, factors);
  };
  const double together = static_cast<double>(bytes_on("aaaabbbb", true));
  const double alone = static_cast<double>(bytes_on("abcdefgh", true));
  // 8 workers push 7/8 of a layer each over the network, two machines half of it; a factor goes to 7 or 1.
  EXPECT_LT(together / alone, 1.02 / 7);
  EXPECT_EQ(bytes_on("abcdefgh", false), bytes_on("abcdefgh", true)) << "nobody shares a machine";
}

INSTANTIATE_TEST_SUITE_P(Schemes, BytesOfHosts, ::testing::Values(Scheme::ps, Scheme::sfb));

/// One rank for each letter, which names its rack. Each has a machine of its own.
std::vector<Options> in_racks(const std::string& racks) {
  auto all = cluster_options(static_cast<int>(racks.size()));
  for (std::size_t rank = 0; rank < racks.size(); ++rank) {
    all[rank].machine = std::to_string(rank);
    if (racks[rank] != ' ') all[rank].rack = racks.substr(rank, 1);
  }
  return all;
}

TEST(Racks, AddUpAndCountTheBytesOfTheirOwnNetwork) {
  constexpr std::size_t kSide = 512;
  for (const Scheme scheme : {Scheme::ps, Scheme::sfb}) {
    const auto bytes_in = [&](const std::string& racks) {
      TestCluster cluster(in_racks(racks));
      EXPECT_TRUE(cluster.connected());
      EXPECT_EQ(cluster.clients.front()->cluster().racks.empty(), racks == "        ");
      const auto layer = cluster.add({matrix_layer("layer", kSide, kSide, scheme)});
      return static_cast<double>(bytes_of_step(cluster, layer, kSide * kSide, scheme == Scheme::sfb));
    };
    // Workers send as much as without racks. Their pushes cross the uplinks once for each rack, and not for each
    // worker.
    const double sent = bytes_in("aaaabbbb") / bytes_in("        ");
    EXPECT_NEAR(sent, scheme == Scheme::sfb ? 1.0 : (0.75 + 0.125 + 0.75) / 0.875, 0.02);
  }
}

TEST(Racks, ThatContradictEachOtherAreToldInOneSentence) {
  const auto why_not = [](std::vector<Options> all) {
    std::string message;
    run_ranks(static_cast<int>(all.size()), [&](int rank) {
      auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
      EXPECT_FALSE(client.ok());
      if (rank == 0) EXPECT_EQ(client.status().code(), ErrorCode::invalid_argument);
      if (rank == 0) message = client.status().message();
    });
    return message;
  };
  auto on_one_machine = in_racks("aab");
  on_one_machine[2].machine = on_one_machine[1].machine;
  EXPECT_NE(why_not(on_one_machine).find("ranks 1 and 2 are on one machine, but in racks a and b"), std::string::npos);
  EXPECT_NE(why_not(in_racks("aa b")).find("rank 2 has no rack"), std::string::npos);
}

TEST(Racks, OfOneWorkerAndOfUnequalSizesWork) {
  for (const std::string racks : {"aab", "abb", "aaabbc"}) {
    TestCluster cluster(in_racks(racks));
    ASSERT_TRUE(cluster.connected()) << racks;
    const auto layer = cluster.add({matrix_layer("layer", 64, 64, Scheme::ps)});
    bytes_of_step(cluster, layer, 64 * 64, false);
  }
}

TEST(Racks, OfMachinesOfSeveralWorkersPushOnce) {
  constexpr std::size_t kSide = 512;
  for (const Scheme scheme : {Scheme::ps, Scheme::sfb}) {
    const auto bytes_in = [&](const std::string& racks) {
      TestCluster cluster(on_hosts("aabbccdd", racks));
      EXPECT_TRUE(cluster.connected());
      const auto layer = cluster.add({matrix_layer("layer", kSide, kSide, scheme)});
      return static_cast<double>(bytes_of_step(cluster, layer, kSide * kSide, scheme == Scheme::sfb));
    };
    // Without racks each machine pushes 3/4 of the layer. With them it gives half of it to the other machine of its
    // rack, pushes a quarter of it for the rack, and gives half of the result back. Factors go to three machines.
    EXPECT_NEAR(bytes_in("xxxxyyyy") / bytes_in(""), scheme == Scheme::sfb ? 1.0 : 1.25 / 0.75, 0.02);
  }
}

TEST(HostReduction, DividesLikeOneSumWhateverTheMachines) {
  const std::vector<std::pair<std::string, std::string>> all = {
      {"aabb", ""},         {"abab", ""},         {"aaab", ""},   {"aabbc", ""},        {"abacab", ""},
      {"aabbcc", "xxxxyy"}, {"aabbcc", "xxyyxx"}, {"abc", "xxy"}, {"abcabd", "xyxxyx"}, {"aabbccdd", "xxxxyyyy"},
  };
  for (const auto& [hosts, racks] : all) {
    TestCluster cluster(on_hosts(hosts, racks));
    ASSERT_TRUE(cluster.connected()) << hosts;
    Layer narrow = vector_layer("narrow", 5000);
    narrow.wire = WireFormat::fp16;
    const auto first = cluster.add({vector_layer("plain", 5000), narrow, vector_layer("small", 3)});
    const auto workers = static_cast<std::uint32_t>(hosts.size());
    cluster.each([&](std::size_t rank, Client& client) {
      // The sum of so large numbers is more than float16 holds; their mean is not.
      std::vector<std::vector<float>> gradients(3, std::vector<float>(5000, 60'000.0F));
      gradients.back().resize(3);
      for (std::uint32_t i = 0; i < 3; ++i) {
        const Status status = client.start(first + i, bytes_of(gradients[i]), workers);
        ASSERT_TRUE(status.ok()) << status.message();
      }
      const Status status = client.wait_all(always);
      ASSERT_TRUE(status.ok()) << status.message();
      for (const auto& gradient : gradients)
        for (const float value : gradient) ASSERT_NEAR(value, 60'000.0F, 64.0F) << hosts << ", rank " << rank;
    });
  }
}

TEST_IN_VIRTUAL_TIME(HostReduction, TellsAWorkerOfTheSameMachineThatItHasAnotherDivisor) {
  auto all = on_hosts("aabb");
  for (auto& options : all) options.chunk_bytes = 4096;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("layer", 100'000)});
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> gradient(100'000, 1.0F);
    if (rank == 0) pause_for(std::chrono::milliseconds(50));  // the other's parts come early
    const Status started = client.start(layer, bytes_of(gradient), rank == 1 ? 2 : 4);
    const Status status = started.ok() ? client.wait(layer, always) : started;
    EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
    EXPECT_TRUE(contains(status, "divides by")) << status.message();
  });
}

Layer kept_layer(std::size_t element_count) {
  Layer layer = vector_layer("kept", element_count);
  layer.stored = true;
  return layer;
}

/// The value minus the gradient.
UpdateRule descent() {
  UpdateRule rule{.kind = find_update_rule("sgd")};
  rule.values[0] = 1.0;  // lr
  return rule;
}

/// Waits for an operation on the layer, which `started` is the start of.
void expect_done(Client& client, std::uint32_t layer, const Status& started) {
  const Status status = started.ok() ? client.wait(layer, always) : started;
  ASSERT_TRUE(status.ok()) << status.message();
}

class Groups : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(Groups, UpdateValuesAlsoForWorkersThatDoNotWantThem) {
  TestCluster cluster(on_hosts(GetParam().first, GetParam().second));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({kept_layer(100'000)});
  cluster.each([&](std::size_t rank, Client& client) {
    const auto wait = [&](const Status& started) { expect_done(client, layer, started); };
    std::vector<float> value(100'000, 10.0F);
    const std::vector<float> gradient(100'000, static_cast<float>(rank));
    if (rank == 0) wait(client.assign(layer, bytes_of(value)));
    if (rank != 0) wait(client.pull(layer, bytes_of(value)));
    for (int step = 1; step <= 3; ++step) {
      ASSERT_TRUE(client.set_rule(layer, descent()).ok());
      // Every rank leads some chunks. In each step another one does not want the value.
      if (static_cast<int>(rank) == step) {
        wait(client.push(layer, std::as_bytes(std::span(gradient)), 4));
        continue;
      }
      wait(client.push_pull(layer, std::as_bytes(std::span(gradient)), bytes_of(value), 4));
      EXPECT_EQ(value, std::vector<float>(100'000, 10.0F - 1.5F * static_cast<float>(step))) << "step " << step;
    }
    wait(client.pull(layer, bytes_of(value)));
    EXPECT_EQ(value.front(), 5.5F);
  });
}

TEST(HostReduction, AssignsBeforeTheNextStepWhoeverLeads) {
  TestCluster cluster(on_hosts("aaabbb"));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({kept_layer(50'000)});
  cluster.each([&](std::size_t rank, Client& client) {
    const auto wait = [&](const Status& started) { expect_done(client, layer, started); };
    ASSERT_TRUE(client.set_rule(layer, descent()).ok());
    const std::vector<float> gradient(50'000, 1.0F);
    for (int step = 1; step <= 20; ++step) {
      // Rank 0 alone sets the value before each step, and nobody waits for it.
      std::vector<float> value(50'000, static_cast<float>(10 * step));
      if (rank == 0) wait(client.assign(layer, bytes_of(value)));
      wait(client.push_pull(layer, std::as_bytes(std::span(gradient)), bytes_of(value), 6));
      EXPECT_EQ(value, std::vector<float>(50'000, static_cast<float>(10 * step - 1))) << "step " << step;
    }
  });
}

TEST(HostReduction, RefusesAnAggregatorThatNeedsEachGradient) {
  TestCluster cluster(on_hosts("aabb"));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({kept_layer(100)});
  cluster.each([&](std::size_t, Client& client) {
    const Status status = client.set_rule(layer, {.aggregator = "median"});
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(status, "reduce_by_host=off")) << status.message();
  });
}

TEST_P(Groups, TellThatARankHasSetAnotherRule) {
  for (const std::size_t lonely : {0U, 1U, 3U}) {
    TestCluster cluster(on_hosts(GetParam().first, GetParam().second));
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add({kept_layer(100'000)});
    cluster.each([&](std::size_t rank, Client& client) {
      const std::vector<float> gradient(100'000, 1.0F);
      std::vector<float> value(100'000);
      if (rank == lonely) EXPECT_TRUE(client.set_rule(layer, descent()).ok());
      const Status started = client.push_pull(layer, std::as_bytes(std::span(gradient)), bytes_of(value), 4);
      const Status status = started.ok() ? client.wait(layer, always) : started;
      EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
      EXPECT_TRUE(contains(status, "another update rule")) << status.message();
    });
  }
}

void leave_right_after_the_last_step(const std::string& hosts, const std::string& racks) {
  for (int round = 0; round < 10; ++round) {
    TestCluster cluster(on_hosts(hosts, racks));
    ASSERT_TRUE(cluster.connected());
    const auto first = cluster.add({matrix_layer("factors", 400, 400, Scheme::sfb), vector_layer("dense", 50'000)});
    cluster.each([&](std::size_t rank, Client& client) {
      std::vector<float> product(400 * 400);
      std::vector<float> dense(50'000, 1.0F);
      const std::vector<float> left(400 * 8, 1.0F);
      const FactorRows rows{reinterpret_cast<const std::byte*>(left.data()),
                            reinterpret_cast<const std::byte*>(left.data()), 8};
      if (static_cast<int>(rank) == round % 4) pause_for(std::chrono::milliseconds(20));
      ASSERT_TRUE(client.start(first + 1, bytes_of(dense), 4).ok());
      ASSERT_TRUE(client.start_factors(first, DType::float32, {rows}, bytes_of(product), 1, false).ok());
      const Status status = client.wait_all(always);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(product.back(), 32.0F);
      client.shutdown();
    });
  }
}

TEST_P(Groups, EndWhenAllLeaveRightAfterTheLastStep) {
  in_virtual_time([] { leave_right_after_the_last_step(GetParam().first, GetParam().second); });
}

TEST_P(Groups, TellAtOnceThatALeaverLacksAPart) {
  TestCluster cluster(on_hosts(GetParam().first, GetParam().second));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({vector_layer("first", 100'000), vector_layer("second", 100'000)});
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<float> gradient(100'000, 1.0F);
    std::vector<float> other(100'000, 1.0F);
    if (rank == 1) {  // it takes part in the second layer alone, and leaves
      ASSERT_TRUE(client.start(first + 1, bytes_of(gradient), 4).ok());
      return client.shutdown();
    }
    const Status started = client.start(first, bytes_of(gradient), 4);
    const Status status = started.ok() ? client.wait(first, always) : started;
    EXPECT_EQ(status.code(), ErrorCode::peer_lost) << status.message();
    EXPECT_TRUE(contains(status, "rank 1")) << status.message();
  });
}

TEST_P(Groups, TellWhoHasLeftBeforeTheStep) {
  TestCluster cluster(on_hosts(GetParam().first, GetParam().second));
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("layer", 100'000)});
  cluster.each([&](std::size_t rank, Client& client) {
    if (rank == 1) return client.shutdown();
    std::vector<float> gradient(100'000, 1.0F);
    const Status started = client.start(layer, bytes_of(gradient), 4);
    const Status status = started.ok() ? client.wait(layer, always) : started;
    EXPECT_EQ(status.code(), ErrorCode::peer_lost) << status.message();
    EXPECT_TRUE(contains(status, "rank 1")) << status.message();
  });
}

// Machines and racks of four workers.
INSTANTIATE_TEST_SUITE_P(All, Groups,
                         ::testing::Values(std::pair("aabb", ""), std::pair("abcd", "xxyy"), std::pair("aabc", "xxxy"),
                                           std::pair("abca", "xyyx")));

}  // namespace
}  // namespace poseidon::testing
