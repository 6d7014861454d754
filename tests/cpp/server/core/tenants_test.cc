// Jobs that share a server: their names, their number, and the generations of one job.
#include "server/core/tenants.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/server/server_fixture.h"
#include "transport/inproc/inproc_transport.h"

namespace poseidon {
namespace {

using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::header_of;
using testing::push_of;
using testing::Received;
using testing::stored_push_of;
using testing::text_of;

/// A transport whose connections have all proved one secret.
class Door final : public Transport {
 public:
  Door(Transport& inner, std::string key_id) : inner_(inner), key_id_(std::move(key_id)) {}
  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           std::function<void(std::shared_ptr<Flow>)> on_accept) override {
    return inner_.listen(loop, address, [key_id = key_id_, on_accept](std::shared_ptr<Flow> flow) {
      flow->set_key_id(key_id);
      on_accept(std::move(flow));
    });
  }
  void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
               std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
    inner_.connect(loop, address, deadline, std::move(done));
  }

 private:
  Transport& inner_;
  const std::string key_id_;
};

class TenantsTest : public ::testing::Test, protected testing::ServerWithWorkers {
 protected:
  TenantsTest() : ServerWithWorkers(make_inproc_transport()) {
    options_.world_size = 0;
    options_.timeout = std::chrono::seconds(20);
  }

  void start() { ServerWithWorkers::start(options_, "server"); }
  void start_with_doors() {
    start();
    for (auto& [name, door] : doors_) ASSERT_TRUE(server->listen(*door, name).ok());
  }

  /// A connection that has sent its hello, and the answer.
  std::pair<std::unique_ptr<End>, Received> greet(const wire::Hello& hello, const std::string& address = "server") {
    auto end = connect_to(address);
    end->receive();
    say_hello(*end, hello);
    auto answer = message(*end, 1);
    return {std::move(end), std::move(answer)};
  }
  std::unique_ptr<End> enter(const wire::Hello& hello, const std::string& address = "server") {
    auto [end, answer] = greet(hello, address);
    EXPECT_EQ(answer.header.kind, wire::Kind::hello) << text_of(answer);
    return std::move(end);
  }
  void expect_refused(const wire::Hello& hello, const std::string& word, const std::string& address = "server") {
    const auto [end, answer] = greet(hello, address);
    EXPECT_EQ(answer.header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(answer).find(word), std::string::npos) << text_of(answer);
    EXPECT_EQ(end->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  static wire::Hello of_generation(std::uint32_t generation, std::uint32_t rank, std::uint32_t worker_count) {
    return {rank, worker_count, "job", 0, {}, 0, generation};
  }

  Options options_;

 private:
  std::vector<std::pair<std::string, std::unique_ptr<Door>>> make_doors() {
    std::vector<std::pair<std::string, std::unique_ptr<Door>>> doors;
    for (const char* key : {"red", "blue"}) doors.emplace_back(key, std::make_unique<Door>(transport(), key));
    return doors;
  }
  std::vector<std::pair<std::string, std::unique_ptr<Door>>> doors_ = make_doors();
};

TEST_F(TenantsTest, JobsOfOneNameUnderTwoSecretsHaveNothingToDoWithEachOther) {
  start_with_doors();
  const auto red0 = enter({0, 2, "job"}, "red");
  const auto blue0 = enter({0, 1, "job"}, "blue");  // the same rank, and another number of workers
  push(*red0, push_of(0, 2), {1, 2});
  push(*blue0, stored_push_of(0, 1), {10, 20, 30});
  EXPECT_EQ(floats_of(message(*blue0, 2)), (Floats{10, 20, 30}));
  const auto red1 = enter({1, 2, "job"}, "red");
  send(*red1, header_of(wire::Kind::pull, 1, 2), {});  // blue's value is not there
  push(*red1, stored_push_of(1, 2), {5, 5});
  EXPECT_EQ(message(*red1, 2).header.kind, wire::Kind::refuse) << "red's step keeps no value";
  push(*red1, push_of(1, 2), {5, 5});
  EXPECT_EQ(floats_of(message(*red0, 2)), (Floats{6, 7}));
  blue0->close(std::chrono::milliseconds(0));
  push(*red0, push_of(0, 2, 2), {1, 1});
  push(*red1, push_of(1, 2, 2), {1, 1});
  EXPECT_EQ(floats_of(message(*red0, 3)), (Floats{2, 2}));
}

TEST_F(TenantsTest, ALaterGenerationUnderAnotherSecretReplacesNothing) {
  start_with_doors();
  const auto red = enter(of_generation(1, 0, 1), "red");
  const auto blue = enter(of_generation(9, 0, 1), "blue");
  push(*red, push_of(0, 1), {4});
  EXPECT_EQ(floats_of(message(*red, 2)), Floats{4});
}

TEST_F(TenantsTest, AServerTakesSoManyJobsOfOneSecret) {
  options_.max_jobs = 2;
  options_.server_cores = 2;
  start_with_doors();
  auto first = enter({0, 1, "a"}, "red");
  const auto second = enter({0, 1, "b"}, "red");
  const auto again = enter({0, 1, "a"}, "red/1");  // on the other core
  expect_refused({0, 1, "c"}, "max_jobs=2", "red");
  const auto other = enter({0, 1, "c"}, "blue");
  push(*first, push_of(0, 1), {1});
  EXPECT_EQ(floats_of(message(*first, 2)), Floats{1});
  first.reset();
  expect_refused({0, 1, "c"}, "max_jobs=2", "red");  // core 1 has it still
  second->close(std::chrono::milliseconds(0));
  for (int attempt = 0; greet({0, 1, "c"}, "red").second.header.kind != wire::Kind::hello; ++attempt)
    ASSERT_LT(attempt, 1000);
}

TEST_F(TenantsTest, WhatIsSaidToOneNamesNoOther) {
  options_.max_jobs = 1;
  start();
  const auto first = enter({0, 2, "a-secret-project"});
  for (const wire::Hello& hello : {wire::Hello{0, 1, "b"}, wire::Hello{5, 2, "b"}, wire::Hello{0, 1, ""}}) {
    const auto [end, answer] = greet(hello);
    EXPECT_EQ(answer.header.kind, wire::Kind::refuse);
    EXPECT_EQ(text_of(answer).find("secret-project"), std::string::npos) << text_of(answer);
  }
}

TEST_F(TenantsTest, AnEmbeddedServerDoesNotSayWhoseItIs) {
  options_.world_size = 2;
  options_.job = "a-secret-project";
  start();
  const auto [end, answer] = greet({0, 2, "b"});
  EXPECT_EQ(answer.header.kind, wire::Kind::refuse);
  EXPECT_EQ(text_of(answer).find("secret-project"), std::string::npos) << text_of(answer);
}

TEST_F(TenantsTest, ALaterGenerationEndsAnOlderOne) {
  start();
  const auto old0 = enter(of_generation(1, 0, 3));
  const auto old2 = enter(of_generation(1, 2, 3));
  push(*old0, push_of(0, 3), {1, 1});
  push(*old2, push_of(2, 3), {1, 1});
  wire::Contribution stored = stored_push_of(0, 3);
  stored.chunk = 1;
  push(*old0, stored, {3});
  const auto new0 = enter(of_generation(3, 0, 2));  // with fewer workers
  for (const auto* old : {&old0, &old2}) {
    const Received last = message(**old, 2);
    EXPECT_EQ(last.header.kind, wire::Kind::abort);
    EXPECT_NE(text_of(last).find("generation 1 of job 'job' has been replaced by generation 3"), std::string::npos)
        << text_of(last);
    EXPECT_EQ((*old)->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  expect_refused(of_generation(2, 1, 2), "generation 3");
  const auto new1 = enter(of_generation(3, 1, 2));
  push(*new0, push_of(0, 2, 7), {1, 2, 3});  // another step and size: nothing is left of the old ones
  push(*new1, push_of(1, 2, 7), {1, 2, 3});
  for (const auto* worker : {&new0, &new1}) EXPECT_EQ(floats_of(message(**worker, 2)), (Floats{2, 4, 6}));
}

TEST_F(TenantsTest, AHelloIsAnsweredWithItsGeneration) {
  start();
  const auto [end, answer] = greet(of_generation(4, 0, 1));
  EXPECT_EQ(wire::Hello::read(answer.header, answer.payload).generation, 4u);
}

TEST_F(TenantsTest, EveryCoreGoesOnToTheLaterGeneration) {
  for (const Assignment assignment : {Assignment::chunk, Assignment::worker}) {
    options_.server_cores = 2;
    options_.assignment = assignment;
    start();
    std::vector<std::unique_ptr<End>> olds;
    for (const char* core : {"server", "server/1"}) olds.push_back(enter(of_generation(1, 0, 2), core));
    push(*olds[0], push_of(0, 2), {1, 2});
    std::vector<std::unique_ptr<End>> ends;
    for (const char* core : {"server", "server/1"})
      for (const std::uint32_t rank : {0u, 1u}) ends.push_back(enter(of_generation(2, rank, 2), core));
    for (const auto& old : olds) EXPECT_EQ(old->recorder.wait_closed().code(), ErrorCode::peer_lost);
    olds.clear();
    for (std::uint32_t chunk = 0; chunk < 2; ++chunk) {  // chunk 0 is core 0's
      for (const std::uint32_t rank : {0u, 1u}) {
        wire::Contribution header = push_of(rank, 2);
        header.chunk = chunk;
        push(*ends[2 * chunk + rank], header, {1, 1});
      }
      EXPECT_EQ(floats_of(message(*ends[2 * chunk], 2)), (Floats{2, 2}));
    }
    ends.clear();
    server.reset();
  }
}

TEST_F(TenantsTest, AnEmbeddedServerKnowsTheLeastGeneration) {
  options_.world_size = 1;
  options_.job = "job";
  options_.generation = 3;
  start();
  expect_refused(of_generation(2, 0, 1), "generation 3");
  enter(of_generation(3, 0, 1));
  enter(of_generation(4, 0, 1));
}

TEST_F(TenantsTest, AShrinkingJobsServerServesThoseWhoAreThere) {
  options_.world_size = 4;
  options_.job = "job";
  options_.on_failure = OnFailure::shrink;
  start();
  expect_refused(of_generation(1, 0, 5), "4 workers");
  const auto worker = enter(of_generation(1, 0, 2));
  expect_refused(of_generation(1, 1, 3), "2 workers");
  enter(of_generation(2, 2, 3));
  EXPECT_EQ(worker->recorder.wait_closed().code(), ErrorCode::peer_lost);
}

TEST(Tenants, AJobKeepsItsMemoryAsLongAsSomebodyHoldsIt) {
  Options options;
  options.memory_limit = 100;
  Tenants tenants(options);
  auto first = tenants.admit({"red", "a"}, {}).value().memory;
  EXPECT_EQ(first->limit_bytes(), 100u);
  EXPECT_EQ(tenants.admit({"red", "a"}, {}).value().memory, first);
  EXPECT_NE(tenants.admit({"blue", "a"}, {}).value().memory, first);
  first->charge(60);
  first.reset();
  EXPECT_EQ(tenants.admit({"red", "a"}, {}).value().memory->used_bytes(), 0u);
}

TEST(Tenants, AJobThatMayComeBackCanBeEvicted) {
  Options options;
  options.max_jobs = 1;
  Tenants tenants(options);
  EXPECT_FALSE(tenants.evict({"red", "a"}));
  ASSERT_TRUE(tenants.admit({"red", "a"}, {1, "first"}).ok());
  tenants.note_lost({"red", "a"}, {1, "first"}, 2);
  tenants.note_lost({"red", "b"}, {1, "other"}, 2);
  ASSERT_EQ(tenants.lost_jobs().size(), 1u);
  EXPECT_EQ(tenants.lost_jobs().at({"red", "a"}).worker_count, 2u);
  tenants.drain();
  EXPECT_FALSE(tenants.objection({"red", "b"}, {2, "next"}).ok()) << "max_jobs of a secret may come back";
  EXPECT_TRUE(tenants.objection({"red", "a"}, {2, "next"}).ok());
  ASSERT_TRUE(tenants.evict({"red", "a"}));
  EXPECT_EQ(tenants.objection({"red", "a"}, {2, "next"}).code(), ErrorCode::evicted);
  EXPECT_TRUE(tenants.lost_jobs().empty());
  tenants.note_lost({"red", "a"}, {1, "first"}, 2);  // a core that the eviction reaches last
  EXPECT_TRUE(tenants.drained());
}

TEST(Tenants, NoticeOfARankIsTheFirstOnceForAsLongAsItsJobIsHere) {
  Tenants tenants{Options()};
  auto job = tenants.admit({"red", "a"}, {}).value().memory;
  const auto other = tenants.admit({"blue", "a"}, {}).value().memory;
  EXPECT_TRUE(tenants.first_notice({"red", "a"}, 1));
  EXPECT_FALSE(tenants.first_notice({"red", "a"}, 1));
  EXPECT_TRUE(tenants.first_notice({"red", "a"}, 2));
  EXPECT_TRUE(tenants.first_notice({"blue", "a"}, 1));
  job.reset();
  EXPECT_FALSE(tenants.first_notice({"red", "a"}, 3)) << "it has gone";
  job = tenants.admit({"red", "a"}, {}).value().memory;
  EXPECT_TRUE(tenants.first_notice({"red", "a"}, 1));
}

}  // namespace
}  // namespace poseidon
