// ServerImpl over the in-process transport: which workers it accepts, and which requests it refuses without harm to
// other workers.
#include "poseidon/server.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "conformance/handshakes.h"
#include "cpp/rendezvous/ports.h"
#include "cpp/server/server_fixture.h"
#include "simulation/virtual_time.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "wire/messages/ending.h"

namespace poseidon {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::push_of;
using testing::Received;
using testing::text_of;

class ServerTest : public ::testing::Test, protected testing::ServerWithWorkers {
 protected:
  ServerTest() : ServerWithWorkers(make_inproc_transport()) {}

  /// world_size 0: a dedicated server.
  void start(int world_size, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    Options options;
    options.world_size = world_size;
    options.timeout = timeout;
    ServerWithWorkers::start(options, "shard");
  }
};

TEST_F(ServerTest, SumsWhatItsWorkersPush) {
  start(2);
  const auto first = join(0, 2);
  const auto second = join(1, 2);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    push(*second, push_of(1, 2, step), {10, 20});
    push(*first, push_of(0, 2, step), {1, 2});
    for (const auto* worker : {&first, &second}) {
      const Received result = message(**worker, 1 + step);
      EXPECT_EQ(result.header.kind, wire::Kind::result);
      EXPECT_EQ(result.header.step, step);
      EXPECT_EQ(floats_of(result), (Floats{11, 22}));
    }
  }
}

TEST_F(ServerTest, ARefusalGoesToThatWorkerAloneAndTheOthersGoOn) {
  start(3);
  const auto first = join(0, 3);
  const auto second = join(1, 3);
  const auto third = join(2, 3);
  push(*first, push_of(0, 3), {1, 2});
  push(*first, push_of(0, 3), {1, 2});  // twice
  const Received refusal = message(*first, 2);
  EXPECT_EQ(refusal.header.kind, wire::Kind::refuse);
  EXPECT_NE(text_of(refusal).find("rank 0"), std::string::npos);
  EXPECT_EQ(wire::Refuse::read(refusal.header, refusal.payload).status.code(), ErrorCode::refused);
  push(*second, push_of(1, 3), {1});  // of another size
  EXPECT_EQ(message(*second, 2).header.kind, wire::Kind::refuse);
  push(*second, push_of(1, 3), {1, 2});
  push(*third, push_of(2, 3), {1, 2});
  EXPECT_EQ(floats_of(message(*first, 3)), (Floats{3, 6}));
  EXPECT_EQ(floats_of(message(*second, 3)), (Floats{3, 6}));
  EXPECT_EQ(floats_of(message(*third, 2)), (Floats{3, 6}));
}

TEST_F(ServerTest, TwoJobsDoNotDisturbEachOther) {
  start(0);
  const auto a0 = join(0, 2, "a");
  const auto b0 = join(0, 1, "b");
  const auto a1 = join(1, 2, "a");
  push(*a0, push_of(0, 2), {1, 2});
  push(*b0, push_of(0, 1), {5, 6, 7});  // the same unit, chunk and step
  EXPECT_EQ(floats_of(message(*b0, 2)), (Floats{5, 6, 7}));
  b0->close(std::chrono::milliseconds(0));
  push(*a1, push_of(1, 2), {1, 2});
  EXPECT_EQ(floats_of(message(*a0, 2)), (Floats{2, 4}));
  EXPECT_EQ(floats_of(message(*a1, 2)), (Floats{2, 4}));
}

/// A hello of rank `rank` of two, in a run of job "a".
wire::Hello hello_of_run(std::uint32_t rank, const std::string& run) {
  wire::Hello hello{rank, 2, "a"};
  hello.run = run;
  return hello;
}

TEST_F(ServerTest, AnotherRunOfAJobTakesThePlaceOfWhatADeadHostHasLeft) {
  start(0);
  const auto left = connect();  // whose host no longer answers
  say_hello(*left, hello_of_run(0, "first"));
  EXPECT_EQ(message(*left, 1).header.kind, wire::Kind::hello);
  push(*left, push_of(0, 2), {100, 200, 300});
  std::vector<std::unique_ptr<End>> next;
  for (const std::uint32_t rank : {0u, 1u}) {
    next.push_back(connect());
    say_hello(*next.back(), hello_of_run(rank, "second"));
    EXPECT_EQ(message(*next.back(), 1).header.kind, wire::Kind::hello) << text_of(message(*next.back(), 1));
  }
  EXPECT_EQ(message(*left, 2).header.kind, wire::Kind::abort);
  EXPECT_NE(text_of(message(*left, 2)).find("another run"), std::string::npos) << text_of(message(*left, 2));
  for (const std::uint32_t rank : {0u, 1u}) push(*next[rank], push_of(rank, 2), {1, 2});
  for (const auto& worker : next) EXPECT_EQ(floats_of(message(*worker, 2)), (Floats{2, 4})) << "nothing of the first";
  const auto late = connect();  // of the first run
  say_hello(*late, hello_of_run(1, "first"));
  EXPECT_EQ(message(*late, 1).header.kind, wire::Kind::refuse);
  EXPECT_NE(text_of(message(*late, 1)).find("another run"), std::string::npos);
}

TEST_F(ServerTest, ARunThatHasAllItsWorkersGoesOn) {
  start(0);
  std::vector<std::unique_ptr<End>> workers;
  for (const std::uint32_t rank : {0u, 1u}) {
    workers.push_back(connect());
    say_hello(*workers.back(), hello_of_run(rank, "first"));
    EXPECT_EQ(message(*workers.back(), 1).header.kind, wire::Kind::hello);
  }
  const auto other = connect();
  say_hello(*other, hello_of_run(0, "second"));
  EXPECT_EQ(message(*other, 1).header.kind, wire::Kind::refuse);
  EXPECT_NE(text_of(message(*other, 1)).find("another run"), std::string::npos);
  for (const std::uint32_t rank : {0u, 1u}) push(*workers[rank], push_of(rank, 2), {1, 2});
  for (const auto& worker : workers) EXPECT_EQ(floats_of(message(*worker, 2)), (Floats{2, 4}));
}

TEST_F(ServerTest, ASecondProcessOfTheSameRunIsRefused) {
  start(0);
  const auto first = connect();
  say_hello(*first, hello_of_run(0, "run"));
  EXPECT_EQ(message(*first, 1).header.kind, wire::Kind::hello);
  const auto twin = connect();
  say_hello(*twin, hello_of_run(0, "run"));
  EXPECT_NE(text_of(message(*twin, 1)).find("connected already"), std::string::npos) << text_of(message(*twin, 1));
  EXPECT_EQ(first->recorder.messages().size(), 1u);
}

TEST_F(ServerTest, AnEmbeddedServerIsOfOneRun) {
  start(2);
  const auto first = connect();
  say_hello(*first, hello_of_run(0, "first"));
  const auto other = connect();
  wire::Hello hello = hello_of_run(0, "second");
  hello.job = "default";
  say_hello(*other, hello);
  EXPECT_EQ(message(*other, 1).header.kind, wire::Kind::hello) << "the first was of another job";
  const auto twin = connect();
  hello.run = "third";
  say_hello(*twin, hello);
  EXPECT_NE(text_of(message(*twin, 1)).find("another run"), std::string::npos) << text_of(message(*twin, 1));
}

TEST_F(ServerTest, AJobStartsAnewWhenItsWorkersHaveGone) {
  start(0);
  {
    const auto worker = join(0, 2, "a");
    push(*worker, push_of(0, 2), {1, 2});
  }
  // The same job with another number of workers is possible only when the server has dropped the former one.
  const auto enters = [this] {
    const auto worker = connect();
    say_hello(*worker, {0, 1, "a"});
    if (message(*worker, 1).header.kind != wire::Kind::hello) return false;
    push(*worker, push_of(0, 1, 4), {3});
    EXPECT_EQ(floats_of(message(*worker, 2)), (Floats{3}));
    return true;
  };
  EXPECT_TRUE(testing::eventually(enters));
}

TEST_F(ServerTest, RefusesAWrongHelloWithTheReason) {
  start(2);
  const auto first = join(0, 2);
  struct Case {
    std::uint32_t rank;
    std::uint32_t worker_count;
    std::string job;
    std::string word;
  };
  for (const Case& wrong : {Case{1, 2, "other", "other"}, Case{1, 3, "default", "1 of 3"},
                            Case{2, 2, "default", "2 of 2"}, Case{0, 2, "default", "already"}}) {
    const auto refused = connect();
    say_hello(*refused, {wrong.rank, wrong.worker_count, wrong.job});
    const Received answer = message(*refused, 1);
    EXPECT_EQ(answer.header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(answer).find(wrong.word), std::string::npos) << text_of(answer);
    EXPECT_EQ(refused->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  const auto second = join(1, 2);
  push(*first, push_of(0, 2), {1});
  push(*second, push_of(1, 2), {1});
  EXPECT_EQ(floats_of(message(*first, 2)), (Floats{2}));
}

TEST_F(ServerTest, AWorkerHasAConnectionForEachClassHoweverManyTheServerKnows) {
  start(1);  // options of 2 classes
  std::vector<std::unique_ptr<testing::End>> connections;
  for (const std::uint32_t priority_class : {0u, 1u, 5u, 0xffffffffu}) {
    connections.push_back(join(0, 1, "default", 0, 0, priority_class));
    const auto answer = message(*connections.back(), 1);
    EXPECT_EQ(wire::Hello::read(answer.header, answer.payload).priority_class, priority_class);
  }
  connections.push_back(join(0, 1, "default", 0, 1, 5));  // the same class of another flow
  for (const std::uint32_t priority_class : {0u, 5u}) {
    const auto again = connect();
    say_hello(*again, {0, 1, "default", 0, {}, priority_class});
    EXPECT_EQ(message(*again, 1).header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(message(*again, 1)).find("already"), std::string::npos);
  }
  for (std::uint64_t step = 1; step <= 2 * connections.size(); ++step) {
    testing::End& connection = *connections[step % connections.size()];
    push(connection, push_of(0, 1, step), {static_cast<float>(step)});
    const std::size_t count = 1 + (step + connections.size() - 1) / connections.size();
    EXPECT_EQ(floats_of(message(connection, count)), Floats{static_cast<float>(step)}) << "step " << step;
  }
}

TEST_F(ServerTest, AnAnswerHasThePriorityOfItsRequest) {
  start(3);
  std::vector<std::unique_ptr<testing::End>> workers;
  for (std::uint32_t rank = 0; rank < 3; ++rank) workers.push_back(join(rank, 3));
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const auto priority_of = [step](std::uint32_t rank) { return static_cast<std::uint16_t>(100 * step + rank); };
    for (const std::uint32_t rank : {1u, 2u, 0u}) {
      wire::Contribution header = push_of(rank, 3, step);
      header.priority = priority_of(rank);
      push(*workers[rank], header, {1, 2});
    }
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      const Received result = message(*workers[rank], 1 + step);
      EXPECT_EQ(result.header.kind, wire::Kind::result);
      EXPECT_EQ(result.header.priority, priority_of(rank)) << "rank " << rank << ", step " << step;
    }
  }
}

TEST_F(ServerTest, WhoPushesBeforeItsHelloOrForAnotherRankIsDisconnected) {
  start(2);
  const auto refused = connect();
  push(*refused, push_of(0, 2), {1});
  EXPECT_FALSE(refused->recorder.wait_closed().ok());
  const auto first = join(0, 2);
  push(*first, push_of(1, 2), {1});
  EXPECT_FALSE(first->recorder.wait_closed().ok());
}

TEST_F(ServerTest, WhatALostWorkerHadLentIsFreeAgain) {
  start(2);
  const auto first = join(0, 2);
  push(*first, push_of(0, 2), Floats(1000, 1.0F));
  first->close(std::chrono::milliseconds(0));
  EXPECT_TRUE(first->recorder.wait_closed().ok());  // comes when nothing is lent any more
  EXPECT_TRUE(first->sends.wait_all());
}

TEST_F(ServerTest, AMissingPushIsNamedShortlyBeforeTheTimeout) {
  start(3, std::chrono::milliseconds(300));
  const auto first = join(0, 3);
  const auto second = join(1, 3);
  const auto third = join(2, 3);
  push(*first, push_of(0, 3), {1});
  push(*third, push_of(2, 3), {1});
  for (const auto* worker : {&first, &second, &third}) {
    const Received refusal = message(**worker, 2);
    const Status status = wire::Refuse::read(refusal.header, refusal.payload).status;
    EXPECT_EQ(status.code(), ErrorCode::timeout);
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  }
}

TEST_F(ServerTest, OfManyMissingPushesAFewAreNamed) {
  start(20, std::chrono::milliseconds(300));
  std::vector<std::unique_ptr<testing::End>> workers;
  for (std::uint32_t rank = 0; rank < 20; ++rank) workers.push_back(join(rank, 20));
  push(*workers[0], push_of(0, 20), {1});
  const Received refusal = message(*workers[0], 2);
  const Status status = wire::Refuse::read(refusal.header, refusal.payload).status;
  EXPECT_NE(status.message().find("rank 1, 2, 3, 4, 5, 6, 7, 8 and 11 more since"), std::string::npos)
      << status.message();
}

wire::Header goodbye_of(std::uint32_t rank) {
  wire::Header header;
  header.kind = wire::Kind::goodbye;
  header.rank = rank;
  return header;
}

void expect_departure(const Received& refusal, std::uint32_t rank) {
  EXPECT_EQ(refusal.header.kind, wire::Kind::refuse);
  const auto [status, departed_rank] = wire::Refuse::read(refusal.header, refusal.payload);
  EXPECT_EQ(departed_rank, rank);
  EXPECT_EQ(status.code(), ErrorCode::peer_lost);
  EXPECT_NE(status.message().find("rank " + std::to_string(rank) + " has shut down"), std::string::npos)
      << status.message();
}

TEST_F(ServerTest, ARankThatSaysGoodbyeOnAllItsConnectionsEndsTheStepsThatLackIt) {
  start(3);
  const auto first = join(0, 3);
  const auto second = join(1, 3);
  const auto third = join(2, 3);
  const auto third_too = join(2, 3, "default", 0, 0, 1);
  push(*first, push_of(0, 3), {1});
  third->send(goodbye_of(2), Bytes());
  third->close(std::chrono::seconds(1));
  EXPECT_TRUE(third->recorder.wait_closed().ok());
  push(*third_too, push_of(2, 3), {4});  // it has not left on this one
  push(*second, push_of(1, 3), {2});
  EXPECT_EQ(floats_of(message(*first, 2)), (Floats{7}));
  EXPECT_EQ(floats_of(message(*second, 2)), (Floats{7}));
  push(*first, push_of(0, 3, 2), {1});
  third_too->send(goodbye_of(2), Bytes());
  third_too->close(std::chrono::seconds(1));
  expect_departure(message(*first, 3), 2);
  expect_departure(message(*second, 3), 2);  // which is told before it pushes
  push(*second, push_of(1, 3, 2), {1});
  expect_departure(message(*second, 4), 2);
}

TEST_F(ServerTest, GoodbyesAfterTheLastStepAndLossesAreNoDepartures) {
  start(3);
  const auto first = join(0, 3);
  auto second = join(1, 3);
  auto third = join(2, 3);
  push(*first, push_of(0, 3), {1});
  push(*second, push_of(1, 3), {1});
  push(*third, push_of(2, 3), {1});
  third->send(goodbye_of(2), Bytes());  // right behind its last push
  third->close(std::chrono::seconds(1));
  EXPECT_EQ(message(*first, 2).header.kind, wire::Kind::result);
  EXPECT_EQ(message(*second, 2).header.kind, wire::Kind::result);
  second->close(std::chrono::milliseconds(0));  // lost: it said nothing
  EXPECT_TRUE(second->recorder.wait_closed().ok());
  const auto again = join_again(2, 3);
  push(*again, push_of(2, 3, 2), {1});
  push(*first, push_of(0, 3, 2), {1});
  const auto other = join_again(1, 3);
  push(*other, push_of(1, 3, 2), {1});
  EXPECT_EQ(floats_of(message(*first, 3)), (Floats{3}));
}

TEST_F(ServerTest, ShutdownSaysGoodbyeAndMayBeCalledTwice) {
  start(1);
  const auto worker = join(0, 1);
  server->shutdown();
  server->shutdown();
  EXPECT_EQ(message(*worker, 2).header.kind, wire::Kind::goodbye);
  EXPECT_EQ(message(*worker, 2).header.priority, wire::kLastPriority) << "results go before it";
  EXPECT_EQ(worker->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(server->address(), "shard");
  EXPECT_EQ(server->traffic(), TrafficStats());
}

/// Blocks until `bytes` is full. Returns false if the connection ends before.
bool read_all(int fd, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

bool write_message(int fd, wire::Header header, std::span<const std::byte> payload) {
  header.payload_bytes = payload.size();
  Bytes bytes(wire::kHeaderBytes + payload.size());
  wire::encode(header, std::span(bytes).first<wire::kHeaderBytes>());
  std::ranges::copy(payload, bytes.begin() + wire::kHeaderBytes);
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

TEST(EmbeddedServer, SendsTheLastResultToASlowWorkerBeforeItShutsDown) {
  const auto transport = make_tcp_transport();
  Options options;
  ServerImpl server(options);
  ASSERT_TRUE(server.listen(*transport, "127.0.0.1:0").ok());
  const auto port = static_cast<std::uint16_t>(std::stoi(server.address().substr(server.address().find(':') + 1)));
  const FileDescriptor worker = testing::connected_socket(port);
  ASSERT_TRUE(worker);
  ASSERT_TRUE(testing::let_in(worker.get()));
  const auto hello = wire::Hello{0, 1, options.job}.make();
  ASSERT_TRUE(write_message(worker.get(), hello.header, hello.payload()));
  const Bytes gradient = bytes_of(Floats(8u << 20, 1.0F));  // more than sockets hold
  ASSERT_TRUE(write_message(worker.get(), push_of(0, 1).make(), gradient));
  Bytes answer(wire::kHeaderBytes + hello.payload().size() + wire::kHeaderBytes);
  ASSERT_TRUE(read_all(worker.get(), answer));  // the hello and the result's header
  std::thread stop([&server] { server.shutdown(std::chrono::seconds(20)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // longer than a linger: the kernel sends meanwhile
  Bytes result(gradient.size());
  EXPECT_TRUE(read_all(worker.get(), result));
  EXPECT_EQ(result, gradient);
  ::shutdown(worker.get(), SHUT_RDWR);
  stop.join();
}

TEST(StandaloneServer, ReportsAPortInUse) {
  Options options;
  options.interfaces = {"127.0.0.1"};
  auto first = Server::listen(options, 0);
  ASSERT_TRUE(first.ok());
  const std::string address = first.value()->address();
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1)));
  const auto second = Server::listen(options, port);
  EXPECT_EQ(second.status().code(), ErrorCode::unreachable);
  EXPECT_NE(second.status().message().find(std::to_string(port)), std::string::npos);
}

}  // namespace
}  // namespace poseidon
