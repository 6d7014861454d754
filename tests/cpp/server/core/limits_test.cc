// ServerImpl: the limits for connections and jobs. A job that reaches a limit does not disturb others.
#include "server/chunk/limits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/server/server_fixture.h"
#include "simulation/virtual_time.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Bytes;
using testing::End;
using testing::Floats;
using testing::floats_of;
using testing::header_of;
using testing::push_of;
using testing::Received;
using testing::text_of;

constexpr std::size_t kLimit = 1u << 20;

class ServerLimits : public testing::ServerWithWorkers, public ::testing::Test {
 protected:
  explicit ServerLimits(std::unique_ptr<Transport> transport = make_inproc_transport())
      : ServerWithWorkers(std::move(transport)) {
    options_.world_size = 0;
    options_.timeout = std::chrono::seconds(20);
    options_.memory_limit = kLimit;
  }

  void start(const std::string& address = "server") { ServerWithWorkers::start(options_, address); }

  static void expect_refused(const Received& message, const std::string& word) {
    EXPECT_EQ(message.header.kind, wire::Kind::refuse);
    EXPECT_NE(text_of(message).find(word), std::string::npos) << text_of(message);
  }

  /// Makes one step of a job of one worker. The worker's `count`-th message is the result.
  void expect_step(End& worker, std::uint64_t step, std::size_t count) {
    push(worker, push_of(0, 1, step), {1, 2});
    EXPECT_EQ(floats_of(message(worker, count)), (Floats{1, 2}));
  }

  Options options_;
};

class TcpServerLimits : public ServerLimits {
 protected:
  TcpServerLimits() : ServerLimits(make_tcp_transport()) {}
};

TEST_F(TcpServerLimits, APayloadThatHasNoRoomEndsItsSenderAlone) {
  start("127.0.0.1:0");
  const auto other = join(0, 1, "other");
  const auto mate = join(0, 3, "greedy");
  for (const std::uint32_t rank : {1u, 2u}) {
    const auto greedy = join(rank, 3, "greedy");
    const wire::Kind kind = rank == 1 ? wire::Kind::push : wire::Kind::assign;
    send(*greedy, header_of(kind, rank, 3), Bytes(2 * kLimit));
    expect_refused(message(*greedy, 2), "memory_limit");
    EXPECT_EQ(greedy->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  expect_step(*other, 1, 2);
  EXPECT_EQ(mate->recorder.messages().size(), 1u) << "its hello";
}

/// Ranks that are ahead of rank 0 push more than the server may hold. They wait, and no push is refused.
void expect_to_wait_for_rank_zero(testing::ServerWithWorkers& team) {
  constexpr std::uint32_t kRanks = 4;
  constexpr std::uint32_t kUnits = 6;
  const Floats eighth(kLimit / 4 / 8, 1.0F);  // 6/8 of the limit a rank
  std::vector<std::unique_ptr<End>> workers;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) workers.push_back(team.join(rank, kRanks, "late"));
  for (std::uint64_t step = 1; step <= 3; ++step) {
    for (const std::uint32_t rank : {3u, 1u, 2u, 0u}) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the sockets fill meanwhile
      for (std::uint32_t unit = 0; unit < kUnits; ++unit) {
        wire::Contribution header = push_of(rank, kRanks, step);
        header.unit = rank % 2 == 0 ? unit : kUnits - 1 - unit;  // and in different orders
        team.push(*workers[rank], header, eighth);
      }
    }
    for (const auto& worker : workers) {
      for (std::size_t i = 0; i < kUnits; ++i) {
        const Received result = testing::ServerWithWorkers::message(*worker, 2 + (step - 1) * kUnits + i);
        ASSERT_EQ(result.header.kind, wire::Kind::result) << text_of(result);
        ASSERT_EQ(floats_of(result), Floats(eighth.size(), 4.0F));
      }
    }
  }
}

TEST_F(TcpServerLimits, WhoIsAheadOfRankZeroWaits) {
  start("127.0.0.1:0");
  expect_to_wait_for_rank_zero(*this);
}

TEST_F(TcpServerLimits, AShutdownDoesNotWaitForAPeerThatIsFrozen) {
  options_.memory_limit = 0;
  start("127.0.0.1:0");
  const auto frozen = connect_to(server->last_addresses().front());
  say_hello(*frozen, {0, 1, "frozen"});
  push(*frozen, push_of(0, 1), Floats(std::size_t{16} << 20, 1.0F));  // 64 MB, and it reads nothing
  EXPECT_TRUE(frozen->sends.wait_all());
  const auto begun = Clock::now();
  server->shutdown(std::chrono::seconds(60));
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(10));
}

TEST_F(TcpServerLimits, TheCoresOfAServerShareAJobsMemory) {
  options_.server_cores = 2;
  start("127.0.0.1:0");
  const auto first = join(0, 2, "a", 0);
  const auto second = join(0, 2, "a", 1);
  const auto other = join(0, 2, "b", 1);
  const Floats most(kLimit / 4 * 3 / 4, 1.0F);  // three quarters
  push(*first, push_of(0, 2), most);
  push(*first, push_of(0, 2), {1});  // refused when the other has been taken
  expect_refused(message(*first, 2), "already");
  push(*second, push_of(0, 2), most);
  expect_refused(message(*second, 2), "memory_limit");
  push(*other, push_of(0, 2), most);
  push(*other, push_of(0, 2), {1});
  expect_refused(message(*other, 2), "already");  // and not for want of memory, of which each job has its own
}

TEST_F(TcpServerLimits, AllJobsTogetherStayWithinTheServersMemory) {
  options_.server_memory = kLimit;
  options_.server_cores = 2;
  start("127.0.0.1:0");
  const Floats most(kLimit / 4 * 3 / 4, 1.0F);  // three quarters
  const auto push_most = [&](const std::string& job) {
    const auto worker = join(0, 1, job, 1);
    push(*worker, push_of(0, 1), most);
    return message(*worker, 2);
  };
  {
    const auto first = join(0, 2, "first", 0);
    push(*first, push_of(0, 2), most);
    push(*first, push_of(0, 2), {1});  // refused when the other has been taken
    expect_refused(message(*first, 2), "already");
    expect_refused(push_most("second"), "server_memory");
    const auto small = join(0, 1, "small", 1);
    expect_step(*small, 1, 2);
  }
  for (int attempt = 0;; ++attempt) {  // until the server has let go of all that the first one held
    const Received answer = push_most("job " + std::to_string(attempt));
    if (answer.header.kind == wire::Kind::result) break;
    expect_refused(answer, "server_memory");
    ASSERT_LT(attempt, 1000);
  }
}

TEST_F(TcpServerLimits, JobsThatShareACoreAllGetOn) {
  options_.memory_limit = 0;
  start("127.0.0.1:0");
  constexpr std::uint64_t kTiny = 5000;
  std::vector<std::unique_ptr<End>> busy;
  for (std::uint32_t flow = 0; flow < 4; ++flow) {
    busy.push_back(join(0, 1, "busy", 0, flow));
    for (std::uint64_t step = 1; step <= kTiny; ++step) {
      wire::Contribution header = absent_of(push_of(0, 1, step));
      header.unit = flow;
      busy.back()->send(header.make(), Bytes());
    }
  }
  const auto other = join(0, 1, "other");
  for (std::uint64_t step = 1; step <= 50; ++step) {
    push(*other, push_of(0, 1, step), Floats(100'000, 1.0F));
    EXPECT_EQ(message(*other, 1 + step).payload.size(), 400'000u);
  }
  for (const auto& one : busy) EXPECT_TRUE(one->recorder.wait_messages(1 + kTiny));
}

class ShmServerLimits : public ServerLimits {
 protected:
  ShmServerLimits() : ServerLimits(make_shm_transport()) {}
};

TEST_F(ShmServerLimits, WhoIsAheadOfRankZeroWaits) {
  start(":0");
  expect_to_wait_for_rank_zero(*this);
}

TEST_F(ShmServerLimits, ATextThatIsLentIsNoLongerThanOneThatIsRead) {
  start(":0");
  const auto talker = connect();
  wire::Header hello = wire::Hello{0, 1, "default"}.make().header;
  send(*talker, hello, Bytes(wire::kMaxTextBytes + 1, std::byte{'x'}));
  EXPECT_EQ(talker->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_TRUE(talker->recorder.messages().empty()) << "not taken for a name that is too long";
}

TEST_F(ServerLimits, TheSumOfPartsThatAreLentHasRoomOrThePartIsRefused) {
  start();
  const auto worker = join(0, 2);
  send(*worker, push_of(0, 2), Bytes(2 * kLimit));
  expect_refused(message(*worker, 2), "memory_limit");
  push(*worker, push_of(0, 2), {1, 2});
  push(*worker, push_of(0, 2), {1, 2});
  expect_refused(message(*worker, 3), "already");
}

TEST_F(ShmServerLimits, AnswersThatNobodyReadsAreBounded) {
  start(":0");
  const auto deaf = connect_to(server->last_addresses().front());
  say_hello(*deaf, {0, 1, "deaf"});
  constexpr std::uint64_t kPushes = 20'000;
  for (std::uint64_t step = 1; step <= kPushes; ++step) deaf->send(absent_of(push_of(0, 1, step)).make(), Bytes());
  EXPECT_TRUE(deaf->sends.wait_all());
  const auto other = join(0, 1, "other");
  expect_step(*other, 1, 2);
  deaf->receive();
  // The sum of the job's limit, the shared memory, and the refusals that are kept.
  constexpr std::size_t kMost = kLimit / limits::kMessageBytes + 256 + limits::kUnsentRefusals + 64;
  std::size_t count = 1;
  while (message(*deaf, count).header.kind != wire::Kind::refuse) ASSERT_LT(++count, kMost);
  expect_refused(message(*deaf, count), "memory_limit");
  const auto is_answered = [&deaf] {
    return std::ranges::any_of(deaf->recorder.messages(), [](const Received& m) {
      return m.header.unit == 1 && m.header.kind == wire::Kind::result;
    });
  };
  std::uint64_t tries = 0;
  const auto tries_until_answered = [&] {  // when it has read enough there is room again
    if (is_answered()) return true;
    wire::Contribution header = absent_of(push_of(0, 1, ++tries));
    header.unit = 1;
    deaf->send(header.make(), Bytes());
    return false;
  };
  ASSERT_TRUE(testing::eventually(tries_until_answered, std::chrono::milliseconds(5)));
  EXPECT_LT(deaf->recorder.messages().size(), kMost + tries);
}

TEST_F(ServerLimits, WhoSaysNothingIsClosedAfterAWhile) {
  options_.timeout = std::chrono::milliseconds(300);
  start();
  const auto worker = join(0, 1);
  const auto begin = Clock::now();
  const auto silent = connect();
  EXPECT_EQ(silent->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(250));
  expect_step(*worker, 1, 2);
}

TEST_F(ServerLimits, OfThoseWhoSayNothingTheOldestGoes) {
  start();
  std::vector<std::unique_ptr<End>> silent;
  for (std::size_t i = 0; i < limits::kPendingConnections + 3; ++i) silent.push_back(connect());
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(silent[i]->recorder.wait_closed().code(), ErrorCode::peer_lost);
  say_hello(*silent.back(), {0, 1, "late"});
  EXPECT_EQ(message(*silent.back(), 1).header.kind, wire::Kind::hello);
  const auto one_more = connect();
  say_hello(*silent[3], {0, 1, "early"});
  EXPECT_EQ(message(*silent[3], 1).header.kind, wire::Kind::hello) << "there was room again";
}

TEST_F(ServerLimits, ARankHasSoManyConnections) {
  start();
  std::vector<std::unique_ptr<End>> connections;
  for (std::uint32_t i = 0; i < limits::kConnectionsPerRank; ++i) connections.push_back(join(0, 2, "a", 0, i));
  const auto one_more = connect();
  say_hello(*one_more, {0, 2, "a", 1000});
  expect_refused(message(*one_more, 1), "connections");
  join(1, 2, "a");
  connections.pop_back();
  for (int attempt = 0;; ++attempt) {  // until the server has seen the end of the other
    const auto next = connect();
    say_hello(*next, {0, 2, "a", 1000});
    if (message(*next, 1).header.kind == wire::Kind::hello) break;
    ASSERT_LT(attempt, 1000);
  }
}

TEST_F(ServerLimits, AJobHasSoManyWorkersAndANameOfOneLine) {
  start();
  for (const wire::Hello& wrong :
       {wire::Hello{0, limits::kWorkers + 1, "a"}, wire::Hello{0, 0, "a"}, wire::Hello{0, 1, ""},
        wire::Hello{0, 1, std::string(257, 'x')}, wire::Hello{0, 1, "a", 0, {"10.0.0.1:1"}}}) {
    const auto refused = connect();
    say_hello(*refused, wrong);
    EXPECT_EQ(message(*refused, 1).header.kind, wire::Kind::refuse);
    EXPECT_EQ(refused->recorder.wait_closed().code(), ErrorCode::peer_lost);
  }
  join(0, limits::kWorkers, "large");
}

}  // namespace
}  // namespace poseidon
