// stragglers=drop and consistency=ssp, async with real clients.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/kernel/rules.h"
#include "poseidon/features.h"
#include "poseidon/server.h"
#include "server/server_impl.h"
#include "simulation/virtual_time.h"

namespace poseidon {
namespace {

using std::chrono::milliseconds;
using testing::always;
using testing::bytes_of;
using testing::cluster_options;
using testing::contains;
using testing::matrix_layer;
using testing::TestCluster;
using testing::vector_layer;
using testing::with_place_of;

constexpr int kRanks = 4;
constexpr std::uint32_t kSlow = 3;

std::vector<Options> paced_options(const Options& shared) {
  auto all = cluster_options(kRanks);
  for (auto& options : all) options = with_place_of(options, shared);
  return all;
}

Options dropping(Medium transport) {
  Options options;
  options.transport = transport;
  options.stragglers = Stragglers::drop;
  options.chunk_bytes = 4096;
  return options;
}

/// Steps of a small model, which has a matrix of several chunks and a group. Every result is kept.
struct Trained {
  std::vector<std::vector<float>> results;  // by step: all layers after each other
  milliseconds duration{0};
  std::uint64_t most_behind = 0;
};

void make_step(Client& client, std::uint32_t first, std::uint32_t step, Trained& trained) {
  const auto value = static_cast<float>(client.rank() + 1) / static_cast<float>(step);
  std::vector<float> matrix(64 * 64, value);
  std::vector<float> bias(64, -value);
  std::vector<float> norm(10, 2 * value);
  EXPECT_TRUE(client.start(first, bytes_of(matrix), kRanks).ok());
  EXPECT_TRUE(client.start(first + 1, bytes_of(bias), kRanks).ok());
  EXPECT_TRUE(client.start(first + 2, bytes_of(norm), kRanks).ok());
  const Status status = client.wait_all(always);
  EXPECT_TRUE(status.ok()) << status.message();
  trained.most_behind = std::max(trained.most_behind, client.behind());
  std::uint64_t of_layers = 0;
  for (std::uint32_t layer = first; layer < first + 3; ++layer) {
    const LayerStats stats = client.layer_stats(layer);
    EXPECT_TRUE(stats.late() || stats.behind == 0);
    of_layers = std::max<std::uint64_t>(of_layers, stats.behind);
  }
  EXPECT_EQ(of_layers, client.behind());
  auto& all = trained.results.emplace_back(matrix);
  all.insert(all.end(), bias.begin(), bias.end());
  all.insert(all.end(), norm.begin(), norm.end());
}

/// Returns a time that is clearly longer than the `step_count` steps since `begun` took. On a busy machine it is long.
milliseconds clearly_late(Clock::time_point begun, int step_count, milliseconds at_least) {
  const auto passed = std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
  return std::max(at_least, 10 * passed / step_count);
}

/// Waits for all ranks, however far behind they are.
void meet(Client& client, std::uint32_t layer) {
  std::vector<float> nothing(1, 0);
  EXPECT_TRUE(client.start(layer, bytes_of(nothing), 1).ok());
  EXPECT_TRUE(client.wait_all(always).ok());
}

void expect_late_ranks_to_follow(Medium transport) {
  constexpr std::uint32_t kSteps = 26;
  TestCluster cluster(paced_options(dropping(transport)));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
  const auto meeting = cluster.add({vector_layer("meeting", 1)});
  std::vector<Trained> ranks(kRanks);
  std::vector<std::vector<LateRank>> reports(kRanks);
  cluster.each([&](std::size_t rank, Client& client) {
    auto begun = Clock::now();
    for (std::uint32_t step = 1; step <= 12; ++step) make_step(client, first, step, ranks[rank]);
    const auto pause = clearly_late(begun, 12, milliseconds(40));
    begun = Clock::now();
    for (std::uint32_t step = 13; step <= kSteps; ++step) {
      if (rank == kSlow) std::this_thread::sleep_for(pause);  // over real networks, each with a queue of its own
      make_step(client, first, step, ranks[rank]);
    }
    ranks[rank].duration = std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
    meet(client, meeting);
    reports[rank] = client.straggler_report();
  });
  for (std::size_t rank = 0; rank < kRanks; ++rank)
    for (std::size_t step = 0; step < kSteps; ++step)
      ASSERT_EQ(ranks[rank].results[step], ranks[0].results[step]) << "rank " << rank << ", step " << step + 1;
  EXPECT_GE(ranks[kSlow].most_behind, 2u);
  EXPECT_LE(ranks[kSlow].most_behind, 8u);
  EXPECT_LT(ranks[0].duration * 4, ranks[kSlow].duration * 3) << "it could be eight steps ahead";
  for (const std::size_t knows : {std::size_t{kSlow}, std::size_t{0}}) {
    const auto found = std::ranges::find(reports[knows], kSlow, &LateRank::rank);
    ASSERT_NE(found, reports[knows].end());
    EXPECT_GE(found->late_steps, 5u);
    EXPECT_GE(found->late_chunks, found->late_steps);
    EXPECT_GT(found->last_step, 12u);
  }
}

TEST(Stragglers, LateRanksGetTheResultsThatAllOthersGot) { expect_late_ranks_to_follow(Medium::tcp); }
TEST(Stragglers, OverSharedMemoryToo) { expect_late_ranks_to_follow(Medium::automatic); }

TEST_IN_VIRTUAL_TIME(Stragglers, ARankCatchesUpByStepsThatDoNotCount) {
  TestCluster cluster(paced_options(dropping(Medium::automatic)));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
  const auto meeting = cluster.add({vector_layer("meeting", 1)});
  std::vector<Trained> ranks(kRanks);
  std::vector<std::size_t> shadows(kRanks, 0);
  constexpr std::size_t kSteps = 24;
  cluster.each([&](std::size_t rank, Client& client) {
    auto& trained = ranks[rank];
    const auto begun = Clock::now();
    while (trained.results.size() < kSteps) {
      const auto step = static_cast<std::uint32_t>(trained.results.size() + 1);
      if (rank == kSlow && step == 13) pause_for(clearly_late(begun, 12, milliseconds(150)));
      if (rank != kSlow && step > 13) pause_for(milliseconds(15));
      make_step(client, first, step, trained);
      while (client.behind() > 0 && trained.results.size() < kSteps) {
        ++shadows[rank];
        std::vector<float> all(64 * 64 + 64 + 10, 0);
        const std::span<float> values(all);
        EXPECT_TRUE(client.start_absent(first, std::as_writable_bytes(values.first(4096)), kRanks).ok());
        EXPECT_TRUE(client.start_absent(first + 1, std::as_writable_bytes(values.subspan(4096, 64)), kRanks).ok());
        EXPECT_TRUE(client.start_absent(first + 2, std::as_writable_bytes(values.last(10)), kRanks).ok());
        EXPECT_TRUE(client.wait_all(always).ok());
        trained.results.push_back(all);
      }
    }
    EXPECT_LE(client.behind(), 8u);
    meet(client, meeting);
  });
  EXPECT_GE(shadows[kSlow], 3u);
  for (std::size_t rank = 0; rank < kRanks; ++rank)
    for (std::size_t step = 0; step < kSteps; ++step)
      ASSERT_EQ(ranks[rank].results[step], ranks[0].results[step]) << "rank " << rank << ", step " << step + 1;
  for (std::size_t step = 1; step <= kSteps; ++step) {
    // The mean is over all, or over all but the slow rank. It never counts the slow rank as zeros.
    const float value = ranks[0].results[step - 1][0] * static_cast<float>(step);
    const auto close_to = [value](float mean) { return std::abs(value - mean) < 1e-4F; };
    bool known = close_to(2.5F);
    for (int left_out = 1; left_out <= kRanks; ++left_out)
      known = known || close_to(static_cast<float>(10 - left_out) / 3);
    EXPECT_TRUE(known) << "step " << step << ": " << value;
  }
}

TEST(Stragglers, WhoIsAbsentMayStayOutOfTheMean) {
  TestCluster cluster(paced_options(dropping(Medium::automatic)));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
  const std::vector<std::size_t> sizes = {64 * 64, 64, 10};
  for (const bool counts : {false, true}) {
    cluster.each([&](std::size_t rank, Client& client) {
      std::vector<std::vector<float>> arrays;
      for (const std::size_t size : sizes) arrays.emplace_back(size, static_cast<float>(rank + 1));
      for (std::uint32_t layer = 0; layer < sizes.size(); ++layer) {
        const auto bytes = bytes_of(arrays[layer]);
        const Status status = rank == kSlow ? client.start_absent(first + layer, bytes, kRanks, counts)
                                            : client.start(first + layer, bytes, kRanks);
        EXPECT_TRUE(status.ok()) << status.message();
      }
      EXPECT_TRUE(client.wait_all(always).ok());
      const float mean = counts ? 6.0F / 4 : 6.0F / 3;
      for (const auto& array : arrays)
        for (const float value : array) ASSERT_EQ(value, mean) << "rank " << rank << ", counts: " << counts;
      for (std::uint32_t layer = 0; layer < sizes.size(); ++layer) {
        EXPECT_FALSE(client.layer_stats(first + layer).late());
        EXPECT_EQ(client.layer_stats(first + layer).behind, 0U);
      }
    });
  }
}

TEST(Stragglers, WhoIsBehindInOneModelCountsInAnother) {
  TestCluster cluster(paced_options(dropping(Medium::automatic)));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
  const auto other = cluster.add({matrix_layer("other", 64, 64)});
  std::latch are_ahead(kRanks - 1);
  cluster.each([&](std::size_t rank, Client& client) {
    Trained trained;
    for (std::uint32_t step = 1; step <= 12; ++step) make_step(client, first, step, trained);
    if (rank == kSlow) are_ahead.wait();
    for (std::uint32_t step = 13; step <= (rank == kSlow ? 13 : 15); ++step) make_step(client, first, step, trained);
    if (rank != kSlow) are_ahead.count_down();
    EXPECT_EQ(client.behind() > 0, rank == kSlow);
    std::vector<float> values(64 * 64, static_cast<float>(rank + 1));
    const Status status = rank == kSlow ? client.start_absent(other, bytes_of(values), kRanks)
                                        : client.start(other, bytes_of(values), kRanks);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(values, std::vector<float>(64 * 64, 6.0F / 4)) << "rank " << rank;
  });
}

TEST_IN_VIRTUAL_TIME(Stragglers, AServerThatStandsAloneServesJobsOfEitherKind) {
  Options served;
  served.world_size = 0;
  ServerImpl server(served);
  const auto place = std::make_shared<testing::MeetingPlace>();
  ASSERT_TRUE(server.listen(place->transport(), "server:0").ok());
  std::vector<std::vector<Trained>> jobs(2, std::vector<Trained>(kRanks));
  testing::run_ranks(2, [&](int job) {
    Options shared = dropping(Medium::tcp);
    if (job == 1) shared.stragglers = Stragglers::wait;
    shared.job = "job " + std::to_string(job);
    shared.servers = {server.address()};
    TestCluster cluster(paced_options(shared), place);
    ASSERT_TRUE(cluster.connected());
    const auto first =
        cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
    const auto meeting = cluster.add({vector_layer("meeting", 1)});
    cluster.each([&](std::size_t rank, Client& client) {
      const auto begun = Clock::now();
      milliseconds pause{0};
      for (std::uint32_t step = 1; step <= 14; ++step) {
        if (step == 12) pause = clearly_late(begun, 11, milliseconds(40));
        if (rank == kSlow) pause_for(pause);
        make_step(client, first, step, jobs[static_cast<std::size_t>(job)][rank]);
      }
      meet(client, meeting);
      const bool known = !client.straggler_report().empty();
      EXPECT_TRUE(known || job == 1 || rank != kSlow) << "a rank knows its own lateness, whoever serves";
      EXPECT_FALSE(known && job == 1);
    });
  });
  for (const auto& ranks : jobs)
    for (const auto& trained : ranks) EXPECT_EQ(trained.results, ranks[0].results);
  EXPECT_NE(jobs[0][0].results, jobs[1][0].results);
}

TEST(Stragglers, AServerWithABaselineRefusesTheJob) {
  Options served;
  served.interfaces = {"127.0.0.1"};
  served.aggregation = Aggregation::wide;
  const auto server = Server::listen(served, 0);
  ASSERT_TRUE(server.ok()) << server.status().message();
  Options options = testing::test_options(0, 1, testing::free_port());
  options.stragglers = Stragglers::drop;
  options.servers = {server.value()->address()};
  const auto client = Client::connect(options, nullptr, always);
  EXPECT_TRUE(contains(client.status(), "aggregation=wide")) << client.status().message();
}

TEST_IN_VIRTUAL_TIME(Stragglers, ALateRankThatIsLostEndsTheJob) {
  TestCluster cluster(paced_options(dropping(Medium::tcp)));
  ASSERT_TRUE(cluster.connected());
  const auto first = cluster.add({matrix_layer("matrix", 64, 64), vector_layer("bias", 64), vector_layer("norm", 10)});
  cluster.each([&](std::size_t rank, Client& client) {
    Trained trained;
    for (std::uint32_t step = 1; step <= 11; ++step) make_step(client, first, step, trained);
    if (rank == kSlow) {
      pause_for(milliseconds(60));
      client.abort("as if it had been killed");
      return;
    }
    for (std::uint32_t step = 12; client.status().ok(); ++step) {
      std::vector<float> matrix(64 * 64, 1);
      if (client.start(first, bytes_of(matrix), kRanks).ok()) static_cast<void>(client.wait_all(always));
      ASSERT_LE(step, 12u + 9) << "eight steps ahead at most";
    }
    EXPECT_TRUE(contains(client.status(), "killed")) << client.status().message();
  });
}

/// Plain SGD on a stored layer. Every gradient is 1, so P updates lower the value by lr.
TEST_IN_VIRTUAL_TIME(Consistency, SspHoldsTheFastBackAndAsyncDoesNot) {
  for (const Consistency consistency : {Consistency::ssp, Consistency::async}) {
    Options shared;
    shared.consistency = consistency;
    shared.staleness = 2;
    TestCluster cluster(paced_options(shared));
    ASSERT_TRUE(cluster.connected());
    Layer layer = vector_layer("stored", 3000);
    layer.stored = true;
    const auto stored = cluster.add({layer});
    const auto meeting = cluster.add({vector_layer("meeting", 1)});
    std::vector<milliseconds> durations(kRanks);
    std::vector<std::vector<float>> values(kRanks, std::vector<float>(3000, 0));
    constexpr int kSteps = 10;
    cluster.each([&](std::size_t rank, Client& client) {
      const UpdateRule rule = testing::rule_of("sgd", {{"lr", 0.5}});
      EXPECT_TRUE(client.set_rule(stored, rule).ok());
      EXPECT_TRUE(rank != 0 || client.assign(stored, bytes_of(values[0])).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_TRUE(client.pull(stored, bytes_of(values[rank])).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      meet(client, meeting);
      const auto begun = Clock::now();
      std::vector<float> gradient(3000, 1);
      for (int step = 1; step <= kSteps; ++step) {
        if (rank == kSlow) pause_for(milliseconds(30));
        EXPECT_TRUE(client.push_pull(stored, bytes_of(gradient), bytes_of(values[rank]), kRanks).ok());
        const Status status = client.wait_all(always);
        EXPECT_TRUE(status.ok()) << status.message();
        // The value contains at least this rank's pushes, and at most all pushes.
        EXPECT_LE(values[rank][0], -0.5F / kRanks * static_cast<float>(step));
        EXPECT_GE(values[rank][0], -0.5F * kSteps);
      }
      durations[rank] = std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
      meet(client, meeting);
      EXPECT_TRUE(client.pull(stored, bytes_of(values[rank])).ok());
      EXPECT_TRUE(client.wait_all(always).ok());
      EXPECT_EQ(values[rank], std::vector<float>(3000, -0.5F * kSteps)) << "all pushes are in";
    });
    // With ssp a rank is at most two steps ahead.
    EXPECT_EQ(durations[0] >= milliseconds(30 * (kSteps - 2)), consistency == Consistency::ssp);
  }
}

TEST(Stragglers, OptionsThatExcludeEachOtherAreRefused) {
  Options options = testing::test_options(0, 2, testing::free_port());
  options.stragglers = Stragglers::drop;
  options.on_failure = OnFailure::rejoin;
  const auto client = Client::connect(options, nullptr, always);
  EXPECT_EQ(client.status().code(), ErrorCode::invalid_argument);
  EXPECT_EQ(client.status().message(), FeatureSet(options).check().message());
}

TEST(Stragglers, RanksThatDisagreeAreRefused) {
  auto all = cluster_options(2, milliseconds(3000));
  all[1].stragglers = Stragglers::drop;
  std::vector<Status> statuses(2);
  testing::run_ranks(2, [&](int rank) {
    const auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
    // One rank may have connected before it learns of the other's refusal.
    statuses[static_cast<std::size_t>(rank)] =
        client.ok() ? client.value()->add_layers({vector_layer("first", 1)}, false, always).status() : client.status();
  });
  for (const Status& status : statuses) EXPECT_FALSE(status.ok());
  EXPECT_TRUE(contains(statuses[0], "straggler") || contains(statuses[1], "straggler"))
      << statuses[0].message() << "; " << statuses[1].message();
}

TEST(Stragglers, FactorsCannotBeLeftOut) {
  Options options;
  options.stragglers = Stragglers::drop;
  Cluster cluster;
  cluster.worker_count = cluster.server_count = 4;
  const auto refused = make_plan({matrix_layer("fc", 8, 8, Scheme::sfb)}, cluster, options, 0);
  EXPECT_EQ(refused.status().code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(refused.status(), "fc")) << refused.status().message();
  const auto plan = make_plan({matrix_layer("fc", 512, 512)}, cluster, options, 0);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan.value().layers[0].scheme, Scheme::ps);
}

}  // namespace
}  // namespace poseidon
