// The simulation's own transport: without faults it is like any other, and each fault does what its name says.
#include <gtest/gtest.h>

#include "conformance/transport_fixture.h"
#include "simulation/faulty_network.h"
#include "simulation/virtual_time.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint32_t kMessages = 2000;

std::unique_ptr<Transport> make_calm_transport() {
  const auto network = std::make_shared<FaultyNetwork>(FaultyNetwork::Settings{});
  return network->transport(network->add_node(0, true));
}

INSTANTIATE_TEST_SUITE_P(Simulated, TransportTest,
                         ::testing::Values(TransportCase{"calm", make_calm_transport, "any:0", false, false},
                                           TransportCase{"calm_one_loop", make_calm_transport, "any:0", false, true}),
                         [](const auto& tested) { return tested.param.name; });

/// Two processes, connected.
class FaultyPair {
 public:
  explicit FaultyPair(const FaultyNetwork::Settings& settings)
      : network(std::make_shared<FaultyNetwork>(settings)),
        nodes{network->add_node(0, true), network->add_node(1, true)},
        transports_{network->transport(nodes[0]), network->transport(nodes[1])} {
    Awaited<std::shared_ptr<Flow>> accepted;
    listener_ = std::move(transports_[1]
                              ->listen(server_loop_, ":0",
                                       [&](std::shared_ptr<Flow> flow) {
                                         if (!server) accepted.set(std::move(flow));
                                       })
                              .value());
    client = std::make_unique<End>(client_loop_, connect().value());
    server = std::make_unique<End>(server_loop_, accepted.get());
    client->receive();
    server->receive();
  }

  Result<std::shared_ptr<Flow>> connect(milliseconds patience = seconds(10)) {
    Awaited<Result<std::shared_ptr<Flow>>> connected;
    transports_[0]->connect(client_loop_, listener_->address(), Clock::now() + patience,
                            [&](Result<std::shared_ptr<Flow>> flow) { connected.set(std::move(flow)); });
    return connected.get();
  }

  /// Sends numbered messages from the client.
  void send_all(std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) payloads_.push_back(pattern(i % 300, i));
    for (std::uint32_t i = 0; i < count; ++i) client->send(push_header(i), payloads_[i]);
  }

  /// The numbers of what has come; every payload is right.
  std::vector<std::uint32_t> numbers() {
    std::vector<std::uint32_t> found;
    for (const auto& message : server->recorder.messages()) {
      EXPECT_EQ(message.payload, payloads_[message.header.chunk]);
      found.push_back(message.header.chunk);
    }
    return found;
  }

  const std::shared_ptr<FaultyNetwork> network;
  const std::array<std::shared_ptr<Node>, 2> nodes;

 private:
  const std::array<std::unique_ptr<Transport>, 2> transports_;
  std::vector<Bytes> payloads_;
  Loop client_loop_{"client"};
  Loop server_loop_{"server"};
  std::unique_ptr<Listener> listener_;

 public:
  std::unique_ptr<End> client;
  std::unique_ptr<End> server;
};

FaultyNetwork::Settings often(Fault fault, double chance, std::uint64_t seed = 7) {
  FaultyNetwork::Settings settings;
  settings.seed = seed;
  settings.rates[fault] = chance;
  return settings;
}

std::size_t count_of(const FaultyPair& pair, Fault fault) {
  return pair.network->log().counts()[static_cast<std::size_t>(fault)];
}

/// Of `kMessages`, which come over a connection that drops one in twenty.
std::vector<std::uint32_t> numbers_with_drops(std::uint64_t seed) {
  FaultyPair pair(often(Fault::drop, 0.05, seed));
  pair.send_all(kMessages);
  EXPECT_TRUE(pair.client->sends.wait_all());
  const std::size_t dropped = count_of(pair, Fault::drop);
  EXPECT_GT(dropped, kMessages / 50);
  EXPECT_TRUE(pair.server->recorder.wait_messages(kMessages - dropped));
  auto numbers = pair.numbers();
  EXPECT_EQ(numbers.size(), kMessages - dropped);
  return numbers;
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, DropsTheSameMessagesForTheSameSeed) {
  const auto first = numbers_with_drops(1);
  EXPECT_EQ(numbers_with_drops(1), first);
  EXPECT_NE(numbers_with_drops(2), first);
  EXPECT_TRUE(std::is_sorted(first.begin(), first.end()));
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, DelaysWithoutChangingTheOrder) {
  auto settings = often(Fault::delay, 0.02);
  settings.longest_delay = milliseconds(3);
  FaultyPair pair(settings);
  pair.send_all(kMessages);
  ASSERT_TRUE(pair.server->recorder.wait_messages(kMessages));
  const auto numbers = pair.numbers();
  EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end()));
  EXPECT_GT(count_of(pair, Fault::delay), 0u);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, DuplicatesAndReordersWithoutLosing) {
  auto settings = often(Fault::duplicate, 0.02);
  settings.rates[Fault::reorder] = 0.02;
  settings.longest_delay = milliseconds(3);
  FaultyPair pair(settings);
  pair.send_all(kMessages);
  ASSERT_TRUE(pair.client->sends.wait_all());
  const std::size_t twice = count_of(pair, Fault::duplicate);
  ASSERT_TRUE(pair.server->recorder.wait_messages(kMessages + twice));
  auto numbers = pair.numbers();
  EXPECT_FALSE(std::is_sorted(numbers.begin(), numbers.end()));
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(static_cast<std::size_t>(numbers.end() - std::unique(numbers.begin(), numbers.end())), twice);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, ACutEndsBothEnds) {
  FaultyPair pair(often(Fault::cut, 0.01));
  pair.send_all(kMessages);
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_LT(pair.numbers().size(), kMessages);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, AHalfCutLeavesTheOtherEndTalking) {
  FaultyPair pair(often(Fault::half_cut, 1));
  pair.send_all(1);
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  pair.network->calm();
  pair.server->send(push_header(0), Bytes());
  ASSERT_TRUE(pair.server->sends.wait_all());
  EXPECT_EQ(pair.server->sends.codes()[ErrorCode::ok], 1u);
  EXPECT_EQ(pair.server->recorder.closed_count(), 0u);
  EXPECT_EQ(pair.client->recorder.messages().size(), 0u);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, APartitionHoldsBackOrLoses) {
  for (const bool lossy : {false, true}) {
    FaultyPair pair(FaultyNetwork::Settings{});
    pair.network->part(1, 2, false, lossy, milliseconds(80));
    pair.send_all(5);
    pair.server->send(push_header(0), Bytes());
    ASSERT_TRUE(pair.client->recorder.wait_messages(1)) << "the other direction is open";
    EXPECT_EQ(pair.server->recorder.messages().size(), 0u);
    EXPECT_EQ(pair.connect(milliseconds(10)).status().code(), ErrorCode::unreachable);
    pause_for(milliseconds(100));
    EXPECT_EQ(pair.numbers().size(), lossy ? 0u : 5u);
    EXPECT_TRUE(pair.connect().ok());
  }
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, NoWordOfACloseCrossesAPartition) {
  FaultyPair pair(FaultyNetwork::Settings{});
  pair.network->part(1, 2, true, true, milliseconds(80));
  pair.client->close(milliseconds(0));
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
  EXPECT_EQ(pair.server->recorder.closed_count(), 0u);
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, ARefusedAttemptIsMadeAgain) {
  FaultyPair pair(often(Fault::refusal, 0.9));
  EXPECT_TRUE(pair.connect().ok());
  EXPECT_GT(count_of(pair, Fault::refusal), 0u);
}

TEST_IN_VIRTUAL_TIME(FaultyTransport, NothingLeavesAKilledProcess) {
  FaultyPair pair(FaultyNetwork::Settings{});
  pair.send_all(10);
  ASSERT_TRUE(pair.server->recorder.wait_messages(10));
  pair.network->kill(pair.nodes[0], "in this test");
  pair.send_all(10);
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.server->recorder.messages().size(), 10u);
  EXPECT_EQ(pair.connect(milliseconds(50)).status().code(), ErrorCode::unreachable);
}

}  // namespace
}  // namespace poseidon::testing
