// How soon a failure is detected, which events are no failures, and the flight records.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/host.h"
#include "cpp/base/temporary_directory.h"
#include "cpp/client/child_rank.h"
#include "cpp/client/cluster.h"
#include "cpp/client/slow_relay.h"
#include "cpp/client/tap.h"
#include "cpp/transport/own_sockets.h"
#include "poseidon/server.h"
#include "simulation/virtual_time.h"
#include "wire/messages/sending.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;

/// Waits until the condition holds. Returns how long that took.
milliseconds until(const std::function<bool()>& condition, milliseconds at_most) {
  const auto begun = Clock::now();
  static_cast<void>(eventually([&] { return condition() || Clock::now() - begun >= at_most; }));
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
}

/// Waits until the client reports a failure. Returns how long that took.
milliseconds until_failed(const Client& client, milliseconds at_most) {
  return until([&client] { return !client.status().ok(); }, at_most);
}

class Dead : public ::testing::TestWithParam<Medium> {};

TEST_P(Dead, ARankIsKnownToAllWithinASecondThoughNobodyWaits) {
  auto all = cluster_options(4);
  for (auto& options : all) options.transport = GetParam();
  const std::vector<Layer> layers{vector_layer("weights", 1000)};
  ChildRank child(all.back(), layers);
  all.pop_back();
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  cluster.add(layers);
  for (const auto& client : cluster.clients) EXPECT_TRUE(client->status().ok());
  child.kill();
  cluster.each([](std::size_t rank, Client& client) {
    EXPECT_LT(until_failed(client, milliseconds(5000)), milliseconds(1000));
    const Status status = client.status();
    EXPECT_TRUE(status.code() == ErrorCode::peer_lost) << status.message();
    EXPECT_TRUE(contains(status, "rank 3 on " + host_name())) << rank << ": " << status.message();
    EXPECT_TRUE(contains(status, "last heard of rank ")) << status.message();
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Dead, ::testing::Values(Medium::tcp, Medium::shm));

/// Freezes the last rank, and lets the others exchange 'weights', which fails. `check` gets what each of them is told.
/// Returns how long that took.
Clock::duration exchange_with_a_frozen_rank(std::vector<Options> all, const std::function<void(const Status&)>& check) {
  const std::vector<Layer> layers{vector_layer("weights", 1000)};
  ChildRank child(all.back(), layers);
  all.pop_back();
  TestCluster cluster(all);
  EXPECT_TRUE(cluster.connected());
  const auto layer = cluster.add(layers);
  child.stop();
  const auto begun = Clock::now();
  cluster.each([&](std::size_t, Client& client) {
    std::vector<float> gradient(1000);
    EXPECT_TRUE(client.start(layer, bytes_of(gradient), 1).ok());
    const Status status = client.wait_all(always);
    EXPECT_EQ(status.code(), ErrorCode::timeout) << status.message();
    check(status);
  });
  return Clock::now() - begun;
}

TEST(Frozen, ARankIsNamedWithinTheTimeoutWithTheLastProgressOfEach) {
  const auto took = exchange_with_a_frozen_rank(cluster_options(3, milliseconds(900)), [](const Status& status) {
    EXPECT_TRUE(contains(status, "'weights'")) << status.message();
    EXPECT_TRUE(contains(status, "step 1")) << status.message();
    EXPECT_TRUE(contains(status, "last heard of rank ")) << status.message();
    EXPECT_TRUE(contains(status, "rank 2")) << status.message();
  });
  EXPECT_LT(took, milliseconds(1500));
}

TEST(Frozen, ARankEndsTheStepAfterTheTimeoutThoughALateOneIsWaitedForLonger) {
  auto all = cluster_options(3, milliseconds(1'500));
  for (auto& options : all) options.late_timeout = milliseconds(60'000);
  EXPECT_LT(exchange_with_a_frozen_rank(all, [](const Status&) {}), milliseconds(6'000));
}

/// Waits until a notice of the client has the text. Returns how long that took.
milliseconds until_told(const Client& client, const std::string& text, milliseconds at_most) {
  const auto has_text = [&text](const std::string& notice) { return notice.find(text) != std::string::npos; };
  return until([&] { return std::ranges::any_of(client.notices(), has_text); }, at_most);
}

TEST(Frozen, ARankIsToldToAllThoughNobodyWaitsAndMayComeBack) {
  auto all = cluster_options(3, milliseconds(30'000));
  const std::vector<Layer> layers{vector_layer("weights", 1000)};
  ChildRank child(all.back(), layers);
  all.pop_back();
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  cluster.add(layers);
  child.stop();
  const std::string name = "rank 2 on " + host_name();
  for (const auto& client : cluster.clients) {
    EXPECT_LT(until_told(*client, "nothing has come from " + name, milliseconds(10'000)), milliseconds(5'000));
    EXPECT_TRUE(client->status().ok()) << client->status().message();
  }
  child.go_on();
  for (const auto& client : cluster.clients) {
    EXPECT_LT(until_told(*client, name + " is heard again", milliseconds(10'000)), milliseconds(2'000));
    EXPECT_TRUE(client->status().ok()) << client->status().message();
  }
}

class Heartbeats : public ::testing::TestWithParam<Medium> {};

/// Who pulls its value waits, and no server complains of a lack.
Layer unassigned_layer() {
  Layer stored = vector_layer("weights", 1000, DType::float32, Scheme::ps);
  stored.stored = true;
  return stored;
}

TEST_P(Heartbeats, AreNoProgress) {
  auto all = cluster_options(2, milliseconds(1'000));
  for (auto& options : all) options.transport = GetParam();
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({unassigned_layer()});
  std::vector<float> values(1000);
  const auto begun = Clock::now();
  ASSERT_TRUE(cluster.clients[0]->pull(layer, bytes_of(values), 0).ok());  // no server complains of a lack
  EXPECT_EQ(cluster.clients[0]->wait_all(always).code(), ErrorCode::timeout);
  EXPECT_LT(Clock::now() - begun, milliseconds(2'000));
}

INSTANTIATE_TEST_SUITE_P(Media, Heartbeats, ::testing::Values(Medium::tcp, Medium::shm));

TEST(Rates, AreNoProgress) {
  Options server_options;
  server_options.world_size = 0;
  const std::uint16_t port = free_port();
  const auto server = Server::listen(server_options, port);
  ASSERT_TRUE(server.ok()) << server.status().message();
  Tap tap("127.0.0.1:" + std::to_string(port));
  auto all = cluster_options(1, milliseconds(1'000));
  all[0].servers = {tap.address()};
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({unassigned_layer()});
  std::vector<float> values(1000);
  const auto begun = Clock::now();
  ASSERT_TRUE(cluster.clients[0]->pull(layer, bytes_of(values), 0).ok());  // nobody assigns it
  std::thread talker([&] {
    const auto tell = [&] {
      tap.tell_workers(wire::Rate{1 << 20}.make());
      return !cluster.clients[0]->status().ok();
    };
    until(tell, milliseconds(3'000));
  });
  EXPECT_EQ(cluster.clients[0]->wait_all(always).code(), ErrorCode::timeout);
  talker.join();
  EXPECT_LT(Clock::now() - begun, milliseconds(2'000));
}

TEST(Silent, AConnectionThatAcknowledgesNothingIsLostAfterTheTimeout) {
  auto all = cluster_options(2, milliseconds(1'500));
  for (auto& options : all) options.transport = Medium::tcp;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  EXPECT_EQ(cut_off_own_sockets(), 2 * 3 * 2);  // ends; to each other's server and as peers; classes
  cluster.each([](std::size_t, Client& client) {
    const auto took = until_failed(client, milliseconds(10'000));  // nobody waits, but heartbeats are sent
    EXPECT_GE(took, milliseconds(1'000));
    EXPECT_LE(took, milliseconds(4'000));
    EXPECT_TRUE(contains(client.status(), "timed out")) << client.status().message();
  });
}

TEST(Slow, ATensorThatTakesLongerThanTheTimeoutIsNoFailureWhileBytesFlow) {
  constexpr std::size_t kElements = 3u << 18;  // 3 MiB: 0.75 s in each direction
  constexpr std::size_t kBytesPerSecond = 4u << 20;
  Options server_options;
  server_options.world_size = 0;
  server_options.timeout = milliseconds(400);
  const std::uint16_t port = free_port();
  auto server = Server::listen(server_options, port);
  ASSERT_TRUE(server.ok()) << server.status().message();
  SlowRelay relay(port, kBytesPerSecond);
  auto all = cluster_options(1, milliseconds(400));
  all[0].servers = {relay.address()};
  all[0].priority_classes = 1;
  all[0].dscp = {0};
  all[0].chunk_bytes = kElements * sizeof(float);
  all[0].coding = CodingPolicy::off;
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto layer = cluster.add({vector_layer("weights", kElements)});
  std::vector<float> gradient(kElements, 3.0F);
  const auto begun = Clock::now();
  ASSERT_TRUE(cluster.clients[0]->start(layer, bytes_of(gradient), 1).ok());
  const Status status = cluster.clients[0]->wait_all(always);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_GT(Clock::now() - begun, milliseconds(1000));
  EXPECT_EQ(gradient, std::vector<float>(kElements, 3.0F));
}

/// Returns the path that an error names.
std::string record_path(const Status& status) {
  const std::string mark = "; flight record: ";
  const std::size_t at = status.message().find(mark);
  return at == std::string::npos ? "" : status.message().substr(at + mark.size());
}

TEST(FlightRecords, OfEachRankSayWhatItKnew) {
  constexpr std::size_t kElements = 50'000;  // on all servers
  const TemporaryDirectory directory;
  auto all = cluster_options(3);
  for (auto& options : all) {
    options.flight_record = directory.path();
    options.job = "recorded";
  }
  const std::vector<Layer> layers{vector_layer("weights", kElements), matrix_layer("matrix", 40, 40, Scheme::sfb)};
  ChildRank child(all.back(), layers);
  all.pop_back();
  std::vector<std::string> paths(all.size());
  {
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    const auto layer = cluster.add(layers);
    std::atomic<int> started = 0;
    cluster.each([&](std::size_t rank, Client& client) {
      std::vector<float> gradient(kElements);
      std::vector<float> matrix(1600);
      EXPECT_TRUE(client.start(layer, bytes_of(gradient), 1).ok());
      EXPECT_TRUE(client.start(layer + 1, bytes_of(matrix), 1).ok());
      client.traffic();  // waits until its loop has sent them
      ++started;
      if (rank == 0) {
        EXPECT_TRUE(eventually([&] { return started == 2; }));
        for (const auto& one : cluster.clients) one->traffic();  // what has been sent to their servers is there
        child.kill();
      }
      paths[rank] = record_path(client.wait_all(always));
    });
  }
  EXPECT_EQ(directory.names().size(), 2u);
  for (std::size_t rank = 0; rank < paths.size(); ++rank) {
    const std::string text = content_of(paths[rank]);
    for (const std::string part :
         {std::string(R"("process":"worker","job":"recorded")"), R"("rank":)" + std::to_string(rank),
          std::string(R"("phase":"running")"), std::string(R"("code":"peer_lost")"),
          std::string(R"("layer":"weights")"), std::string(R"("layer":"matrix")"), std::string(R"("loop":"client")"),
          std::string(R"("loop":"server core 0")"), std::string(R"("sent","factors","peer")"),
          std::string(R"("host":")") + host_name() + '"'})
      EXPECT_NE(text.find(part), std::string::npos) << part;
  }
  // Their common fields show that they belong together.
  const auto run_of = [](const std::string& text) { return text.substr(text.find(R"("run":)"), 24); };
  EXPECT_EQ(run_of(content_of(paths[0])), run_of(content_of(paths[1])));
}

TEST(FlightRecords, AreNotWrittenWithoutAFailureOrADirectory) {
  const TemporaryDirectory directory;
  auto all = cluster_options(2);
  all[0].flight_record = directory.path();
  {
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
  }
  EXPECT_TRUE(directory.names().empty());
  all = cluster_options(2);
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  cluster.clients[0]->abort("the loss is not a number");
  until_failed(*cluster.clients[1], milliseconds(2000));
  EXPECT_TRUE(contains(cluster.clients[1]->status(), "not a number"));
  EXPECT_EQ(record_path(cluster.clients[1]->status()), "");
}

TEST(FlightRecords, AJobGoesOnWithoutTheirDirectoryAndSaysSo) {
  auto all = cluster_options(2);
  all[0].flight_record = "/proc/no such place";
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const auto notices = cluster.clients[0]->notices();
  ASSERT_FALSE(notices.empty());
  EXPECT_NE(notices[0].find("/proc/no such place"), std::string::npos);
}

TEST(FlightRecords, ARankThatNeverArrivesLeavesThoseOfTheOthers) {
  const TemporaryDirectory directory;
  auto all = cluster_options(3, milliseconds(500));
  for (auto& options : all) options.flight_record = directory.path();
  run_ranks(2, [&](int rank) {
    const auto client = Client::connect(all[static_cast<std::size_t>(rank)], nullptr, always);
    const std::string text = content_of(record_path(client.status()));
    EXPECT_NE(text.find(R"("phase":"meeting")"), std::string::npos) << client.status().message();
  });
}

TEST(FlightRecords, OfAServerThatStandsAloneNameTheJobsLostRank) {
  const TemporaryDirectory directory;
  Options server_options;
  server_options.world_size = 0;
  server_options.flight_record = directory.path();
  auto all = cluster_options(2);
  const std::uint16_t port = free_port();
  for (auto& options : all) options.servers = {"127.0.0.1:" + std::to_string(port)};
  const std::vector<Layer> layers{vector_layer("weights", 1000)};
  ChildRank child(all.back(), layers);
  auto server = Server::listen(server_options, port);
  ASSERT_TRUE(server.ok()) << server.status().message();
  all.pop_back();
  {
    TestCluster cluster(all);
    ASSERT_TRUE(cluster.connected());
    cluster.add(layers);
    child.kill();
    EXPECT_LT(until_failed(*cluster.clients[0], milliseconds(5000)), milliseconds(1000));
  }
  server.value().reset();  // with what it was still writing
  ASSERT_EQ(directory.names().size(), 1u);
  const std::string text = content_of(directory.path() + "/" + directory.names()[0]);
  EXPECT_NE(text.find(R"("process":"server","job":"default")"), std::string::npos);
  EXPECT_NE(text.find(R"("learnt":{"how":"lost","party":"worker","index":1})"), std::string::npos);
}

}  // namespace
}  // namespace poseidon::testing
