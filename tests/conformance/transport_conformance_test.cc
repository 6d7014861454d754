// The contract of src/transport/transport.h, held against every transport. A new one adds a line at the end.
#include <set>
#include <thread>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr const char* kConformanceSecret = "the conformance suite's own secret";

TEST_P(TransportTest, EchoesPayloadsOfEverySize) {
  std::vector<std::unique_ptr<Bytes>> echoes;  // server loop only; lent to the sends
  std::vector<Bytes> payloads;
  Pair pair = connected_pair();
  pair.server->recorder.on_received = [&](Flow& flow, const Received& received) {
    echoes.push_back(std::make_unique<Bytes>(received.payload));
    flow.send(received.header, {*echoes.back()}, pair.server->sends.entry());
  };
  pair.client->receive();
  pair.server->receive();
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, 64 * std::size_t{1024}, 9 * kMiB}) {
    payloads.push_back(pattern(size, static_cast<std::uint32_t>(size)));
  }
  for (std::uint32_t i = 0; i < payloads.size(); ++i) pair.client->send(push_header(i), payloads[i]);
  ASSERT_TRUE(pair.client->recorder.wait_messages(payloads.size()));
  const auto messages = pair.client->recorder.messages();
  for (std::uint32_t i = 0; i < payloads.size(); ++i) {
    EXPECT_EQ(messages[i].header.chunk, i);
    EXPECT_EQ(messages[i].header.payload_bytes, payloads[i].size());
    EXPECT_EQ(messages[i].payload, payloads[i]) << "payload of " << payloads[i].size() << " bytes";
  }
}

TEST_P(TransportTest, JoinsThePiecesOfAPayload) {
  const Bytes whole = pattern(3 * kMiB + 17, 5);
  const std::span<const std::byte> all(whole);
  Pair pair = receiving_pair();
  // More pieces than one system call takes, empty ones among them.
  std::vector<std::span<const std::byte>> pieces{all.first(1), {}, all.subspan(1, 2 * kMiB), {}};
  for (std::size_t at = 2 * kMiB + 1; at < whole.size(); at += 8 * 1024) {
    pieces.push_back(all.subspan(at, std::min<std::size_t>(8 * 1024, whole.size() - at)));
  }
  ASSERT_GT(pieces.size(), 64u);
  pair.client->send(push_header(1), pieces);
  pair.client->send(push_header(2), std::vector<std::span<const std::byte>>{{}, all.first(10), {}});
  pair.client->send(push_header(3), std::vector<std::span<const std::byte>>{{}, {}});
  ASSERT_TRUE(pair.server->recorder.wait_messages(3));
  const auto messages = pair.server->recorder.messages();
  EXPECT_EQ(messages[0].payload, whole);
  EXPECT_EQ(messages[1].payload, Bytes(whole.begin(), whole.begin() + 10));
  EXPECT_EQ(messages[2].payload, Bytes());
}

TEST_P(TransportTest, HoldsBackWhatTheReceiverDoesNotLetCome) {
  const Bytes large = pattern(9 * kMiB, 3);  // which no medium lends, since it has two pieces
  const std::span<const std::byte> all(large);
  const std::vector<std::span<const std::byte>> pieces{all.first(kMiB), all.subspan(kMiB)};
  Pair pair = receiving_pair();
  pair.client->send(push_header(1), Bytes());
  ASSERT_TRUE(pair.server->recorder.wait_messages(1));
  pair.server->recorder.let_come(false);
  pair.client->send(push_header(2), pieces);
  pair.client->send(push_header(3), Bytes());
  ASSERT_TRUE(pair.server->recorder.wait_asked(1));
  // The other direction goes on, and asking in vain changes nothing.
  pair.server->send(push_header(4), pieces);
  ASSERT_TRUE(pair.client->recorder.wait_messages(1));
  EXPECT_EQ(pair.server->recorder.messages().size(), 1u);
  server_loop().call([&] { pair.server->flow().resume(); });
  ASSERT_TRUE(pair.server->recorder.wait_asked(2));
  EXPECT_EQ(pair.server->recorder.messages().size(), 1u);
  pair.server->recorder.let_come(true);
  server_loop().call([&] { pair.server->flow().resume(); });
  ASSERT_TRUE(pair.server->recorder.wait_messages(3));
  const auto messages = pair.server->recorder.messages();
  EXPECT_EQ(messages[1].payload, large);
  EXPECT_EQ(messages[2].header.chunk, 3u);
  server_loop().call([&] { pair.server->flow().resume(); });  // without effect
  pair.client->send(push_header(5), pieces);
  ASSERT_TRUE(pair.server->recorder.wait_messages(4));
}

TEST_P(TransportTest, EndsWhileItHoldsSomethingBack) {
  const Bytes large = pattern(9 * kMiB, 3);
  const std::span<const std::byte> all(large);
  for (const bool own_close : {true, false}) {
    Pair pair = receiving_pair();
    pair.server->recorder.let_come(false);
    pair.client->send(push_header(1), {all.first(kMiB), all.subspan(kMiB)});
    ASSERT_TRUE(pair.server->recorder.wait_asked(1));
    (own_close ? pair.server : pair.client)->close(milliseconds(0));
    if (!own_close) {  // what has come is held back, and the end behind it
      pair.server->recorder.let_come(true);
      server_loop().call([&] { pair.server->flow().resume(); });
    }
    EXPECT_EQ(pair.server->recorder.wait_closed().code(), own_close ? ErrorCode::ok : ErrorCode::peer_lost);
    EXPECT_NE(pair.client->recorder.wait_closed().code(), ErrorCode::timeout);
  }
}

TEST_P(TransportTest, CarriesEveryHeaderField) {
  const Bytes payload = pattern(10, 1);
  Pair pair = receiving_pair();
  wire::Contribution sent;
  sent.kind = wire::Kind::factors;
  sent.dtype = DType::bfloat16;
  sent.dense = true;
  sent.rank = 1;
  sent.worker_count = 2;
  sent.unit = 3;
  sent.chunk = 4;
  sent.step = std::uint64_t{5} << 40;
  sent.divisor = 6;
  sent.factor_count = 7;
  sent.rows = 8;
  sent.cols = 9;
  sent.priority = 10;
  sent.payload_bytes = 12345;  // send fills in the real one
  pair.client->send(sent.make(), payload);
  ASSERT_TRUE(pair.server->recorder.wait_messages(1));
  sent.payload_bytes = payload.size();
  EXPECT_EQ(wire::Contribution::read(pair.server->recorder.messages()[0].header), sent);
}

TEST_P(TransportTest, KeepsTheOrderOfManySmallMessages) {
  constexpr std::uint32_t kCount = 10'000;
  std::vector<Bytes> payloads;
  Pair pair = receiving_pair();
  for (std::uint32_t i = 0; i < kCount; ++i) payloads.push_back(pattern(i % 97, i));
  for (std::uint32_t i = 0; i < kCount; ++i) pair.client->send(push_header(i), payloads[i]);
  ASSERT_TRUE(pair.server->recorder.wait_messages(kCount));
  const auto messages = pair.server->recorder.messages();
  ASSERT_EQ(messages.size(), kCount);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(messages[i].header.chunk, i);
    ASSERT_EQ(messages[i].payload, payloads[i]);
  }
}

TEST_P(TransportTest, CarriesBothDirectionsAtOnce) {
  constexpr std::uint32_t kCount = 40;
  const Bytes there = pattern(kMiB, 1);
  const Bytes back = pattern(kMiB + 1, 2);
  Pair pair = receiving_pair();
  for (std::uint32_t i = 0; i < kCount; ++i) {
    pair.client->send(push_header(i), there);
    pair.server->send(push_header(i), back);
  }
  ASSERT_TRUE(pair.server->recorder.wait_messages(kCount));
  ASSERT_TRUE(pair.client->recorder.wait_messages(kCount));
  for (const auto& message : pair.server->recorder.messages()) ASSERT_EQ(message.payload, there);
  for (const auto& message : pair.client->recorder.messages()) ASSERT_EQ(message.payload, back);
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], kCount);
}

TEST_P(TransportTest, ServesManyFlowsOnOneLoop) {
  constexpr std::uint32_t kFlows = 48;
  constexpr std::uint32_t kMessages = 10;
  std::vector<Bytes> payloads;
  for (std::uint32_t i = 0; i < kFlows; ++i) payloads.push_back(pattern(100'000, i));
  std::mutex mutex;
  std::vector<std::shared_ptr<Flow>> accepted;
  std::condition_variable changed;
  auto listener = transport().listen(server_loop(), GetParam().any_address, [&](std::shared_ptr<Flow> flow) {
    const std::lock_guard lock(mutex);
    accepted.push_back(std::move(flow));
    changed.notify_all();
  });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  std::vector<std::unique_ptr<End>> clients;
  for (std::uint32_t i = 0; i < kFlows; ++i) {
    auto flow = connect(listener.value()->address(), kPatience);
    ASSERT_TRUE(flow.ok()) << flow.status().message();
    clients.push_back(std::make_unique<End>(client_loop(), std::move(flow.value())));
    clients.back()->receive();
  }
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, kPatience, [&] { return accepted.size() == kFlows; }));
  }
  std::vector<std::unique_ptr<End>> servers;
  for (auto& flow : accepted) servers.push_back(std::make_unique<End>(server_loop(), std::move(flow)));
  for (auto& server : servers) server->receive();
  for (std::uint32_t round = 0; round < kMessages; ++round) {
    for (std::uint32_t i = 0; i < kFlows; ++i) clients[i]->send(push_header(i), payloads[i]);
  }
  std::set<std::uint32_t> seen;
  for (auto& server : servers) {
    ASSERT_TRUE(server->recorder.wait_messages(kMessages));
    const auto messages = server->recorder.messages();
    for (const auto& message : messages) {
      ASSERT_EQ(message.header.chunk, messages[0].header.chunk);
      ASSERT_EQ(message.payload, payloads[message.header.chunk]);
    }
    seen.insert(messages[0].header.chunk);
  }
  EXPECT_EQ(seen.size(), kFlows);
}

TEST_P(TransportTest, CallsNothingFromInsideSend) {
  const Bytes payload = pattern(100, 1);
  Pair pair = receiving_pair();
  pair.client->loop().call([&] {
    auto done = std::make_shared<bool>(false);
    pair.client->flow().send(push_header(1), {payload}, [done, log = pair.client->sends.entry()](const Status& status) {
      *done = true;
      log(status);
    });
    EXPECT_FALSE(*done);
    pair.client->flow().close(milliseconds(0));
    EXPECT_FALSE(*done);
    EXPECT_EQ(pair.client->recorder.closed_count(), 0u);
  });
  EXPECT_TRUE(pair.client->sends.wait_all());
}

TEST_P(TransportTest, CompletesEverySendOnceWhenClosedInFlight) {
  const Bytes payload = pattern(kMiB, 1);
  Pair pair = connected_pair();
  pair.client->receive();  // the server never reads
  for (std::uint32_t i = 0; i < 64; ++i) pair.client->send(push_header(i), payload);
  pair.client->close(milliseconds(50));
  pair.server.reset();
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_LT(pair.client->sends.codes()[ErrorCode::ok], 64u);
}

TEST_P(TransportTest, CompletesEverySendOnceWhenThePeerDies) {
  const Bytes payload = pattern(kMiB, 1);
  Pair pair = connected_pair();
  pair.client->receive();
  for (std::uint32_t i = 0; i < 64; ++i) pair.client->send(push_header(i), payload);
  pair.server.reset();
  const Status status = pair.client->recorder.wait_closed();
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find(pair.client->flow().peer_name()), std::string::npos) << status.message();
  ASSERT_TRUE(pair.client->sends.wait_all());
  auto codes = pair.client->sends.codes();
  EXPECT_GT(codes[ErrorCode::peer_lost], 0u);
  EXPECT_EQ(codes[ErrorCode::peer_lost] + codes[ErrorCode::ok], 64u);
}

TEST_P(TransportTest, EveryDoneComesBeforeOnClosed) {
  const Bytes payload = pattern(kMiB, 1);
  Pair pair = connected_pair();
  pair.client->receive();
  for (std::uint32_t i = 0; i < 32; ++i) pair.client->send(push_header(i), payload);
  pair.client->loop().call([] {});  // all are sent before the peer goes
  pair.server.reset();
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.client->sends.done_count(), 32u);
}

TEST_P(TransportTest, RefusesASendAfterClose) {
  const Bytes payload = pattern(10, 1);
  Pair pair = receiving_pair();
  pair.client->close(milliseconds(0));
  pair.client->send(push_header(1), payload);
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::shut_down], 1u);
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
}

TEST_P(TransportTest, AcceptsEachMessageOnceBeforeItIsDelivered) {
  const Bytes payload = pattern(9 * kMiB, 1);  // more than shared memory lends
  const std::span<const std::byte> all(payload);
  Pair pair = receiving_pair();
  std::size_t count = 0;
  for (const std::size_t size_bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{kMiB}, all.size()}) {
    std::vector<std::span<const std::byte>> pieces;
    if (size_bytes > 0) pieces.push_back(all.first(size_bytes));
    pair.client->send(push_header(1), pieces);
    ++count;
    if (size_bytes < 2) continue;
    pair.client->send(push_header(2), {all.first(1), all.subspan(1, size_bytes - 1)});  // in two pieces
    ++count;
  }
  ASSERT_TRUE(pair.server->recorder.wait_messages(count));
  EXPECT_EQ(pair.server->recorder.accepted_count(), count);
}

TEST_P(TransportTest, ARefusedHeaderClosesTheFlowWithThatStatus) {
  const Bytes payload = pattern(9 * kMiB, 1);  // in two pieces, and more than shared memory lends
  const std::span<const std::byte> all(payload);
  const std::vector<std::vector<std::span<const std::byte>>> all_ways{
      {all.first(500), all.subspan(500)}, {all}, {all.first(1000)}, {}};
  for (const auto& pieces : all_ways) {
    Pair pair = connected_pair();
    pair.server->recorder.refuse_header = Status(ErrorCode::refused, "no place for this");
    pair.client->receive();
    pair.server->receive();
    pair.client->send(push_header(1), pieces);
    const Status status = pair.server->recorder.wait_closed();
    EXPECT_EQ(status.code(), ErrorCode::refused);
    EXPECT_EQ(status.message(), "no place for this");
    EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
    EXPECT_TRUE(pair.server->recorder.messages().empty());
    EXPECT_EQ(pair.server->recorder.accepted_count(), 1u);
  }
}

TEST_P(TransportTest, ARefusedMessageClosesTheFlowWithThatStatus) {
  const Bytes payload = pattern(1000, 1);
  Pair pair = connected_pair();
  pair.server->recorder.refuse_message = Status(ErrorCode::mismatch, "another model");
  pair.client->receive();
  pair.server->receive();
  for (std::uint32_t i = 0; i < 5; ++i) pair.client->send(push_header(i), payload);
  EXPECT_EQ(pair.server->recorder.wait_closed().message(), "another model");
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.server->recorder.messages().size(), 1u);
}

TEST_P(TransportTest, MayCloseFromInsideOnMessage) {
  const Bytes payload = pattern(1000, 1);
  Pair pair = connected_pair();
  pair.server->recorder.on_received = [](Flow& flow, const Received&) { flow.close(milliseconds(0)); };
  pair.client->receive();
  pair.server->receive();
  for (std::uint32_t i = 0; i < 5; ++i) pair.client->send(push_header(i), payload);
  EXPECT_TRUE(pair.server->recorder.wait_closed().ok());
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.server->recorder.messages().size(), 1u);
}

TEST_P(TransportTest, CloseSendsWhatIsQueuedFirst) {
  const Bytes payload = pattern(kMiB, 1);
  Pair pair = receiving_pair();
  for (std::uint32_t i = 0; i < 24; ++i) pair.client->send(push_header(i), payload);
  for (std::uint32_t i = 0; i < 24; ++i) pair.server->send(push_header(i), payload);
  pair.client->close(seconds(20));
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.server->recorder.messages().size(), 24u);
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], 24u);
}

TEST_P(TransportTest, BothEndsMayCloseAtOnce) {
  const Bytes payload = pattern(1000, 1);
  Pair pair = receiving_pair();
  pair.client->send(push_header(1), payload);
  pair.server->send(push_header(1), payload);
  const auto before = Clock::now();
  pair.client->loop().post([&] { pair.client->flow().close(seconds(20)); });
  pair.server->loop().post([&] { pair.server->flow().close(seconds(20)); });
  // One of them may learn of the other's close before it runs its own.
  EXPECT_NE(pair.client->recorder.wait_closed().code(), ErrorCode::timeout);
  EXPECT_NE(pair.server->recorder.wait_closed().code(), ErrorCode::timeout);
  EXPECT_LT(Clock::now() - before, seconds(10));
}

TEST_P(TransportTest, HoldsMessagesForALateReceiver) {
  const Bytes payload = pattern(5000, 1);
  Pair pair = connected_pair();
  pair.client->receive();
  for (std::uint32_t i = 0; i < 10; ++i) pair.client->send(push_header(i), payload);
  for (int round = 0; round < 10; ++round)
    for (Loop* const loop : {&client_loop(), &server_loop()}) loop->call([] {});  // what can arrive has arrived
  pair.client->close(seconds(20));
  pair.server->receive();
  ASSERT_TRUE(pair.server->recorder.wait_messages(10));
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
}

TEST_P(TransportTest, DroppingAFlowWithoutAReceiverClosesIt) {
  Pair pair = connected_pair();
  pair.client->receive();
  pair.server.reset();
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
}

TEST_P(TransportTest, CountsTheBytesOfTheNetwork) {
  const Bytes payload = pattern(kMiB, 1);
  Pair pair = receiving_pair();
  for (std::uint32_t i = 0; i < 3; ++i) pair.client->send(push_header(i), payload);
  pair.client->send(push_header(3), Bytes());
  ASSERT_TRUE(pair.server->recorder.wait_messages(4));
  ASSERT_TRUE(pair.client->sends.wait_all());
  std::uint64_t expected = GetParam().counts_bytes ? 3 * kMiB + 4 * wire::kHeaderBytes : 0;
  pair.client->loop().call([&] {
    const std::uint64_t sent = pair.client->flow().traffic().bytes_sent;
    if (GetParam().codes) {
      EXPECT_LT(sent, 0.9 * 3 * kMiB);
      EXPECT_GT(sent, 0.8 * 3 * kMiB);
      expected = sent;
    }
    EXPECT_EQ(sent, expected);
  });
  pair.server->loop().call([&] { EXPECT_EQ(pair.server->flow().traffic().bytes_received, expected); });
  pair.server->loop().call([&] { EXPECT_EQ(pair.server->flow().traffic().bytes_sent, 0u); });
}

TEST_P(TransportTest, ConnectingToNobodyIsUnreachableAtTheDeadline) {
  const std::string address = vacant_address();
  const auto before = Clock::now();
  const auto flow = connect(address, milliseconds(300));
  const auto took = Clock::now() - before;
  ASSERT_FALSE(flow.ok());
  EXPECT_EQ(flow.status().code(), ErrorCode::unreachable);
  EXPECT_NE(flow.status().message().find(address), std::string::npos) << flow.status().message();
  EXPECT_GE(took, milliseconds(290));
  EXPECT_LT(took, seconds(5));
}

TEST_P(TransportTest, ConnectWaitsForTheListener) {
  const Bytes payload = pattern(10, 1);
  const std::string address = vacant_address();
  auto answer = std::make_shared<std::promise<Result<std::shared_ptr<Flow>>>>();
  transport().connect(client_loop(), address, Clock::now() + kPatience,
                      [answer](Result<std::shared_ptr<Flow>> result) { answer->set_value(std::move(result)); });
  EXPECT_FALSE(connect(address, milliseconds(120)).ok());  // attempts fail meanwhile
  std::promise<std::shared_ptr<Flow>> accepted;
  auto listener = transport().listen(server_loop(), address,
                                     [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  auto flow = answer->get_future().get();
  ASSERT_TRUE(flow.ok()) << flow.status().message();
  End client(client_loop(), std::move(flow.value()));
  End server(server_loop(), accepted.get_future().get());
  client.receive();
  server.receive();
  client.send(push_header(1), payload);
  EXPECT_TRUE(server.recorder.wait_messages(1));
}

TEST_P(TransportTest, AnAddressInUseIsAnErrorThatNamesIt) {
  auto first = transport().listen(server_loop(), GetParam().any_address, [](std::shared_ptr<Flow>) {});
  ASSERT_TRUE(first.ok());
  const auto second = transport().listen(server_loop(), first.value()->address(), [](std::shared_ptr<Flow>) {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), ErrorCode::unreachable);
  EXPECT_NE(second.status().message().find(first.value()->address()), std::string::npos);
  EXPECT_NE(second.status().message().find("already in use"), std::string::npos) << second.status().message();
}

TEST_P(TransportTest, TheDeathOfAPeersLoopClosesTheFlow) {
  const Bytes payload = pattern(kMiB, 1);
  std::promise<std::shared_ptr<Flow>> accepted;
  auto listener = transport().listen(server_loop(), GetParam().any_address,
                                     [&](std::shared_ptr<Flow> flow) { accepted.set_value(std::move(flow)); });
  ASSERT_TRUE(listener.ok());
  Recorder orphan;
  auto loop = std::make_unique<Loop>("short");
  std::promise<Status> connected;
  transport().connect(*loop, listener.value()->address(), Clock::now() + kPatience,
                      [&](Result<std::shared_ptr<Flow>> flow) {
                        if (flow.ok()) flow.value()->set_receiver(&orphan);
                        connected.set_value(flow.status());
                      });
  ASSERT_TRUE(connected.get_future().get().ok());
  End server(server_loop(), accepted.get_future().get());
  server.receive();
  for (std::uint32_t i = 0; i < 8; ++i) server.send(push_header(i), payload);
  loop.reset();
  EXPECT_EQ(server.recorder.wait_closed().code(), ErrorCode::peer_lost);
}

std::unique_ptr<Transport> make_tcp_with_secret() { return make_tcp_transport(admission_with(kConformanceSecret)); }
std::unique_ptr<Transport> make_shm_with_secret() { return make_shm_transport(admission_with(kConformanceSecret)); }

INSTANTIATE_TEST_SUITE_P(
    Transports, TransportTest,
    ::testing::Values(TransportCase{"tcp", make_tcp_transport, own_loopback(), true, false},
                      TransportCase{"tcp_one_loop", make_tcp_transport, own_loopback(), true, true},
                      TransportCase{"tcp_v6", make_tcp_transport, "[::1]:0", true, false},
                      TransportCase{"tcp_secret", make_tcp_with_secret, own_loopback(), true, false},
                      TransportCase{"inproc", make_inproc_transport, "shard:0", false, false},
                      TransportCase{"inproc_one_loop", make_inproc_transport, "shard:0", false, true},
                      TransportCase{"shm", make_shm_transport, "shm:0", false, false},
                      TransportCase{"shm_one_loop", make_shm_transport, "shm:0", false, true},
                      TransportCase{"shm_secret", make_shm_with_secret, "shm:0", false, false}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
