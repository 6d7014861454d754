// Servers with several cores: over every transport, with chunks or workers assigned to cores.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cpp/rendezvous/ports.h"
#include "cpp/server/chunk/reference_update.h"
#include "cpp/server/server_fixture.h"
#include "poseidon/server.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "wire/messages/rule.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Bytes;
using testing::bytes_of;
using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::header_of;
using testing::push_of;
using testing::Received;
using testing::stored_push_of;
using testing::text_of;

struct Medium {
  std::string name;
  std::unique_ptr<Transport> (*make)();
  std::string any_address;
};

constexpr std::uint32_t kWorkers = 3;
constexpr std::uint32_t kCores = 3;
constexpr std::uint32_t kFlows = 2;

using Case = std::tuple<Medium, Assignment, Aggregation>;

class ServerCores : public ::testing::TestWithParam<Case>, protected testing::ServerWithWorkers {
 protected:
  ServerCores() : ServerWithWorkers(std::get<Medium>(GetParam()).make()) {}

  void start() {
    Options options;
    options.world_size = 0;
    options.server_cores = static_cast<int>(kCores);
    options.assignment = std::get<Assignment>(GetParam());
    options.aggregation = std::get<Aggregation>(GetParam());
    options.timeout = std::chrono::seconds(20);
    ServerWithWorkers::start(options, std::get<Medium>(GetParam()).any_address);
    ASSERT_EQ(server->core_count(), kCores);
    ASSERT_EQ(server->last_addresses().size(), kCores);
  }

  /// All of one worker's flows, by core and flow.
  std::vector<std::unique_ptr<End>> join_all(std::uint32_t rank, const std::string& job = "default") {
    std::vector<std::unique_ptr<End>> flows;
    for (std::uint32_t core = 0; core < kCores; ++core)
      for (std::uint32_t flow = 0; flow < kFlows; ++flow) flows.push_back(join(rank, kWorkers, job, core, flow));
    return flows;
  }

  /// The flow that carries a worker's messages about a chunk.
  static End& flow_of(const std::vector<std::unique_ptr<End>>& flows, std::uint32_t rank, std::uint32_t chunk) {
    const bool by_worker = std::get<Assignment>(GetParam()) == Assignment::worker;
    const std::uint32_t core = by_worker ? rank % kCores : chunk % kCores;
    return *flows[core * kFlows + chunk / kCores % kFlows];
  }

  static wire::Contribution chunk_push(std::uint32_t rank, std::uint32_t chunk, std::uint64_t step) {
    wire::Contribution header = push_of(rank, kWorkers, step);
    header.chunk = chunk;
    return header;
  }

  /// Waits until `worker` has received `count` messages, and returns those after its hello.
  static std::vector<Received> answers(End& worker, std::size_t count) {
    EXPECT_TRUE(worker.recorder.wait_messages(count + 1));
    auto messages = worker.recorder.messages();
    messages.erase(messages.begin());
    return messages;
  }
};

TEST_P(ServerCores, SumEveryChunkOnItsCore) {
  start();
  std::vector<std::vector<std::unique_ptr<End>>> workers;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) workers.push_back(join_all(rank));
  constexpr std::uint32_t kChunks = 12;
  constexpr std::uint64_t kSteps = 3;
  std::vector<std::vector<std::size_t>> expected(kWorkers, std::vector<std::size_t>(kCores * kFlows, 0));
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      for (std::uint32_t i = 0; i < kChunks; ++i) {
        const std::uint32_t chunk = (i + rank * 5) % kChunks;  // every worker in another order
        End& flow = flow_of(workers[rank], rank, chunk);
        const Floats values(100 + 40'000 * (chunk % 2), static_cast<float>((rank + 1) * (chunk + 1)));
        push(flow, chunk_push(rank, chunk, step), values);
        for (std::size_t at = 0; at < workers[rank].size(); ++at)
          if (workers[rank][at].get() == &flow) ++expected[rank][at];
      }
    }
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      for (std::size_t at = 0; at < workers[rank].size(); ++at) {
        for (const Received& result : answers(*workers[rank][at], expected[rank][at])) {
          ASSERT_EQ(result.header.kind, wire::Kind::result) << text_of(result);
          EXPECT_EQ(result.header.rank, rank);
          EXPECT_EQ(&flow_of(workers[rank], rank, result.header.chunk), workers[rank][at].get());
          const auto sum = static_cast<float>((1 + 2 + 3) * (result.header.chunk + 1));
          EXPECT_EQ(floats_of(result), Floats(100 + 40'000 * (result.header.chunk % 2), sum));
        }
      }
    }
  }
}

TEST_P(ServerCores, ARefusalGoesToThatWorkerAloneAndTheOthersGoOn) {
  start();
  std::vector<std::vector<std::unique_ptr<End>>> workers;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) workers.push_back(join_all(rank));
  constexpr std::uint32_t kChunk = 4;
  const Floats values(300'000, 1.0F);  // arrives in many pieces where the medium has such
  const auto flow = [&](std::uint32_t rank) -> End& { return flow_of(workers[rank], rank, kChunk); };
  push(flow(0), chunk_push(0, kChunk, 1), values);
  push(flow(0), chunk_push(0, kChunk, 1), values);  // twice
  EXPECT_EQ(message(flow(0), 2).header.kind, wire::Kind::refuse);
  wire::Contribution wide = chunk_push(1, kChunk, 1);
  wide.dtype = DType::float64;
  const std::vector<std::pair<wire::Contribution, Floats>> wrong{
      {chunk_push(1, kChunk, 1), Floats(299'000, 1.0F)},  // of another size
      {wide, values},                                     // of another dtype
      {chunk_push(1, kChunk, 2), values},                 // in another step
      {chunk_push(1, kChunk, 1), Floats(400'000, 1.0F)},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    push(flow(1), wrong[i].first, wrong[i].second);
    const Received refusal = message(flow(1), i + 2);
    EXPECT_EQ(refusal.header.kind, wire::Kind::refuse);
    EXPECT_EQ(refusal.header.chunk, kChunk);
    EXPECT_NE(text_of(refusal).find("rank 1"), std::string::npos) << text_of(refusal);
  }
  push(flow(1), chunk_push(1, kChunk, 1), values);
  push(flow(2), chunk_push(2, kChunk, 1), values);
  EXPECT_EQ(floats_of(message(flow(0), 3)), Floats(values.size(), 3.0F));
  EXPECT_EQ(floats_of(message(flow(1), 2 + wrong.size())), Floats(values.size(), 3.0F));
  EXPECT_EQ(floats_of(message(flow(2), 2)), Floats(values.size(), 3.0F));
}

TEST_P(ServerCores, AWorkerThatGoesGetsItsMemoryBackAndDisturbsNoOtherJob) {
  start();
  std::vector<std::vector<std::unique_ptr<End>>> workers;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) workers.push_back(join_all(rank));
  auto other = join_all(0, "other");
  for (std::uint32_t chunk = 0; chunk < 6; ++chunk) {
    for (const std::uint32_t rank : {0u, 2u})
      push(flow_of(workers[rank], rank, chunk), chunk_push(rank, chunk, 1), Floats(50'000, 1.0F));
    push(flow_of(other, 0, chunk), chunk_push(0, chunk, 1), Floats(10, 1.0F));
  }
  for (auto& flow : workers[0]) flow->close(std::chrono::milliseconds(0));
  for (auto& flow : workers[0]) {
    EXPECT_TRUE(flow->recorder.wait_closed().ok());
    EXPECT_TRUE(flow->sends.wait_all());
  }
  std::vector<std::vector<std::unique_ptr<End>>> helpers;
  for (const std::uint32_t rank : {1u, 2u}) {
    helpers.push_back(join_all(rank, "other"));
    for (std::uint32_t chunk = 0; chunk < 6; ++chunk)
      push(flow_of(helpers.back(), rank, chunk), chunk_push(rank, chunk, 1), Floats(10, 1.0F));
  }
  for (std::uint32_t chunk = 0; chunk < 3; ++chunk)
    EXPECT_EQ(floats_of(message(flow_of(other, 0, chunk), 2)), Floats(10, 3.0F));
}

TEST_P(ServerCores, KeepValuesWhereChunksAreAssigned) {
  start();
  std::vector<std::vector<std::unique_ptr<End>>> workers;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) workers.push_back(join_all(rank));
  constexpr std::uint32_t kChunk = 1;
  const auto flow = [&](std::uint32_t rank) -> End& { return flow_of(workers[rank], rank, kChunk); };
  wire::Header assign = header_of(wire::Kind::assign, 0, kWorkers, 0);
  assign.chunk = kChunk;
  std::mt19937 random(2);
  testing::ReferenceParameters reference(testing::random_reals(random, DType::float32, 50'000), DType::float32);
  send(flow(0), assign, reference.value);
  if (std::get<Assignment>(GetParam()) == Assignment::worker) {
    const Received refusal = message(flow(0), 2);
    EXPECT_EQ(refusal.header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(refusal).find("keeps no values"), std::string::npos) << text_of(refusal);
    return;
  }
  const UpdateRule rule = testing::update_rules()[3];
  const auto text = wire::Rule{rule}.make(header_of(wire::Kind::rule, 0, kWorkers));
  send(flow(0), text.header, Bytes(text.payload().begin(), text.payload().end()));
  const Bytes gradient = testing::random_reals(random, DType::float32, 50'000);
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    wire::Contribution header = rank == 2 ? absent_of(stored_push_of(rank, kWorkers)) : stored_push_of(rank, kWorkers);
    header.chunk = kChunk;
    header.divisor = 2;
    send(flow(rank), header, rank == 2 ? Bytes{} : gradient);
  }
  reference.update(rule, gradient);
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) EXPECT_EQ(message(flow(rank), 2).payload, reference.value);
  wire::Header pull = wire::Pull{2}.make(header_of(wire::Kind::pull, 2, kWorkers));
  pull.chunk = kChunk;
  send(flow(2), pull, {});
  EXPECT_EQ(message(flow(2), 3).payload, reference.states[1]);
  EXPECT_EQ(message(flow(2), 3).header.kind, wire::Kind::value);
}

TEST_P(ServerCores, GoWhileResultsAreOnTheirWay) {
  for (int round = 0; round < 10; ++round) {
    start();
    std::vector<std::vector<std::unique_ptr<End>>> workers;
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) workers.push_back(join_all(rank));
    for (std::uint32_t chunk = 0; chunk < 12; ++chunk)
      for (std::uint32_t rank = 0; rank < kWorkers; ++rank)
        push(flow_of(workers[rank], rank, chunk), chunk_push(rank, chunk, 1), Floats(20'000, 1.0F));
    if (round % 2 == 0) server.reset();  // before its workers, or after them
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return std::get<Medium>(info.param).name +
         (std::get<Assignment>(info.param) == Assignment::chunk ? "_chunk" : "_worker") +
         (std::get<Aggregation>(info.param) == Aggregation::streaming ? "_streaming" : "_at_once");
}

INSTANTIATE_TEST_SUITE_P(All, ServerCores,
                         ::testing::Combine(::testing::Values(Medium{"inproc", make_inproc_transport, "server:0"},
                                                              Medium{"tcp", make_tcp_transport, "127.0.0.1:0"},
                                                              Medium{"shm", make_shm_transport, ":0"}),
                                            ::testing::Values(Assignment::chunk, Assignment::worker),
                                            ::testing::Values(Aggregation::streaming, Aggregation::at_once)),
                         name_of);

TEST(ServerAddresses, TheFirstCoreTellsWhereTheOthersAre) {
  testing::ServerWithWorkers fixture(make_tcp_transport());
  Options options;
  options.world_size = 0;
  options.server_cores = 3;
  fixture.start(options, "127.0.0.1:0");
  const auto& addresses = fixture.server->last_addresses();
  ASSERT_EQ(addresses.size(), 3u);
  EXPECT_EQ(addresses[0], fixture.server->address());
  const auto worker = fixture.join(0, 1);
  const Received answer = fixture.message(*worker, 1);
  const wire::Hello hello = wire::Hello::read(answer.header, answer.payload);
  EXPECT_EQ(hello.job, "default");
  EXPECT_EQ(hello.other_cores, (std::vector<std::string>{addresses[1], addresses[2]}));
  const auto second = fixture.join(0, 1, "default", 1, 5);
  const Received second_answer = fixture.message(*second, 1);
  EXPECT_EQ(wire::Hello::read(second_answer.header, second_answer.payload).flow, 5u);
  EXPECT_TRUE(wire::Hello::read(second_answer.header, second_answer.payload).other_cores.empty());
}

TEST(ServerAddresses, EveryInterfaceHasACore) {
  Options options;
  options.interfaces = {"127.0.0.1", "127.0.0.2"};
  for (const int cores : {0, 1, 2, 3}) {
    options.server_cores = cores;
    const auto server = Server::listen(options, 0);
    ASSERT_TRUE(server.ok()) << server.status().message();
    const auto& impl = dynamic_cast<const ServerImpl&>(*server.value());
    ASSERT_EQ(impl.core_count(), static_cast<std::size_t>(std::max(2, cores)));
    for (std::size_t core = 0; core < impl.core_count(); ++core)
      EXPECT_TRUE(impl.last_addresses()[core].starts_with(options.interfaces[core % 2] + ":"));
  }
}

TEST(ServerAddresses, AFixedPortGrowsFromCoreToCore) {
  Options options;
  options.interfaces = {"127.0.0.1"};
  options.server_cores = 3;
  const std::uint16_t port = testing::free_port();
  const auto server = Server::listen(options, port);
  ASSERT_TRUE(server.ok()) << server.status().message();
  const auto& addresses = dynamic_cast<const ServerImpl&>(*server.value()).last_addresses();
  for (std::size_t core = 0; core < 3; ++core) EXPECT_EQ(addresses[core], "127.0.0.1:" + std::to_string(port + core));
}

}  // namespace
}  // namespace poseidon
