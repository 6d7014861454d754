// Members that wait for each other are a fault within seconds. One that is only late is none.
#include "client/standstill.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cpp/client/cluster.h"
#include "plan/mesh.h"
#include "server/server_impl.h"
#include "simulation/virtual_time.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Members whose heartbeats arrive at once, and of which `stands` says whether they stand.
class Members {
 public:
  explicit Members(std::size_t count) {
    for (std::size_t rank = 0; rank < count; ++rank) {
      std::vector<std::size_t> neighbours;
      for (std::size_t other = 0; other < count; ++other)
        if (are_neighbours(rank, other, count)) neighbours.push_back(other);
      neighbours_.push_back(neighbours);
      members.emplace_back(count, neighbours, milliseconds(400));
    }
  }

  /// Returns after how many beats a member says that all stand; `at_most` if none does.
  int beats_until_all_stand(const std::function<bool(std::size_t)>& stands, int at_most) {
    for (int beat = 1; beat <= at_most; ++beat) {
      now_ns_ += 400'000'000;
      std::vector<std::uint32_t> levels;
      for (std::size_t rank = 0; rank < members.size(); ++rank)
        levels.push_back(members[rank].beat(stands(rank), now_ns_));
      for (std::size_t rank = 0; rank < members.size(); ++rank)
        for (const std::size_t other : neighbours_[rank]) members[other].heard(rank, levels[rank], now_ns_);
      for (const Standstill& member : members)
        if (member.all_stand()) return beat;
    }
    return at_most;
  }

  std::vector<Standstill> members;

 private:
  std::vector<std::vector<std::size_t>> neighbours_;
  std::int64_t now_ns_ = 1;
};

TEST(StandstillTest, IsKnownAfterSomeHeartbeats) {
  const auto all = [](std::size_t) { return true; };
  EXPECT_LE(Members(2).beats_until_all_stand(all, 100), 8);
  EXPECT_LE(Members(64).beats_until_all_stand(all, 100), 8);
  EXPECT_LE(Members(300).beats_until_all_stand(all, 100), 24);
}

TEST(StandstillTest, IsNoneWhileOneMemberDoesNotStand) {
  for (const std::size_t count : {2u, 5u, 300u})
    EXPECT_EQ(Members(count).beats_until_all_stand([count](std::size_t rank) { return rank != count - 1; }, 60), 60);
}

TEST(StandstillTest, IsNoneWhereEachMemberStandsAtOtherTimes) {
  for (const std::size_t count : {2u, 5u, 130u}) {
    int beat = 0;
    std::size_t asked = 0;
    // Each stands for as long as it takes, but at any time one of them does not.
    const auto stands = [&](std::size_t rank) {
      if (asked++ % count == 0) ++beat;
      return rank != static_cast<std::size_t>(beat) / 6 % count;
    };
    EXPECT_EQ(Members(count).beats_until_all_stand(stands, 200), 200) << count;
  }
}

TEST(StandstillTest, IsNoneWithoutFreshHeartbeats) {
  Standstill one(2, {1}, milliseconds(400));
  one.heard(1, 20, 1);
  for (int beat = 0; beat < 30; ++beat) {
    one.beat(true, 2'000'000'000);
    EXPECT_FALSE(one.all_stand());
  }
}

TEST(StandstillTest, SaysWhatTheOthersWaitFor) {
  Standstill one(5, {1, 2, 3, 4}, milliseconds(400));
  for (const std::size_t rank : {1u, 2u, 3u}) one.heard(rank, rank == 3 ? 0 : 1, 1);
  one.note(1, "in step 1");
  one.note(2, "in step 1");
  EXPECT_EQ(one.others(2), "; ranks 1 and 2: in step 1; rank 3: not inside a wait of Poseidon");
  one.heard(1, 0, 2);
  EXPECT_EQ(one.others(3), "; rank 2: in step 1; ranks 1 and 3: not inside a wait of Poseidon");
}

/// The tests run in virtual time, but for that in which threads of the operating system act for each other.
class AllWait : public ::testing::TestWithParam<bool> {
 protected:
  /// Three ranks with layers 'first' and 'second', with embedded servers or a dedicated one.
  void connect(
      milliseconds timeout, const std::function<void(Options&)>& change = [](Options&) {}) {
    all = cluster_options(3, timeout);
    if (GetParam()) {
      Options options;
      options.world_size = 0;
      server = std::make_unique<ServerImpl>(options);
      const Status status = World::current() == nullptr ? server->listen(make_tcp_transport(), {"127.0.0.1:0"})
                                                        : server->listen(place->transport(), "server:0");
      ASSERT_TRUE(status.ok()) << status.message();
      for (auto& one : all) one.servers = {server->address()};
    }
    for (auto& one : all) one.group_bytes = 1;  // each layer goes alone
    for (auto& one : all) change(one);
    cluster = std::make_unique<TestCluster>(all, place);
    ASSERT_TRUE(cluster->connected());
    first = cluster->add({vector_layer("first", 1000), vector_layer("second", 2000)});
  }

  static Status exchange(Client& client, std::uint32_t layer, std::size_t element_count) {
    std::vector<float> gradient(element_count, 1.0f);
    if (Status status = client.start(layer, bytes_of(gradient), 3); !status.ok()) return status;
    return client.wait_all(always);
  }

  void in_virtual_time(const std::function<void()>& test) {
    testing::in_virtual_time([this, test] {
      test();
      cluster.reset();
      server.reset();
    });
  }

  std::vector<Options> all;
  const std::shared_ptr<MeetingPlace> place = std::make_shared<MeetingPlace>();
  std::unique_ptr<ServerImpl> server;
  std::unique_ptr<TestCluster> cluster;
  std::uint32_t first = 0;
};

TEST_P(AllWait, IsAFaultWithinSecondsThatSaysWhatEachWaitsFor) {
  in_virtual_time([&] {
    connect(seconds(60));
    const auto begun = Clock::now();
    cluster->each([&](std::size_t rank, Client& client) {
      const Status status = rank == 1 ? exchange(client, first + 1, 2000) : exchange(client, first, 1000);
      EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
      EXPECT_TRUE(contains(status, "all ranks wait for each other")) << status.message();
      EXPECT_TRUE(contains(status, "layer 'first'")) << status.message();
      EXPECT_TRUE(contains(status, "layer 'second'")) << status.message();
    });
    EXPECT_LT(Clock::now() - begun, seconds(15));
  });
}

TEST_P(AllWait, IsNoneWhileOneComputesOrAThreadThatHasExchangedDoes) {
  in_virtual_time([&] {
    connect(seconds(60));
    cluster->each([&](std::size_t rank, Client& client) {
      if (rank == 1) pause_for(seconds(7));
      if (rank != 2) {
        EXPECT_TRUE(exchange(client, first, 1000).ok());
        EXPECT_TRUE(exchange(client, first + 1, 2000).ok());
        return;
      }
      // The main thread waits for what another one is about to start.
      Thread other("other", [&] { EXPECT_TRUE(exchange(client, first + 1, 2000).ok()); });
      EXPECT_TRUE(exchange(client, first, 1000).ok());
      other.join();
    });
  });
}

TEST_P(AllWait, IsAFaultWhereAnotherThreadWaitsForTheOneThatUsesTheClient) {
  connect(seconds(60));
  const auto begun = Clock::now();
  cluster->each([&](std::size_t rank, Client& client) {
    EXPECT_TRUE(exchange(client, first, 1000).ok());
    std::thread worker([&, owner = ::pthread_self()] {
      client.act_for(owner);
      const Status status = rank == 1 ? exchange(client, first + 1, 2000) : exchange(client, first, 1000);
      EXPECT_EQ(status.code(), ErrorCode::mismatch) << status.message();
    });
    worker.join();
  });
  EXPECT_LT(Clock::now() - begun, seconds(15));
}

TEST_P(AllWait, IsNoneWhileTheThreadForWhichOthersActedComputes) {
  connect(seconds(60));
  cluster->each([&](std::size_t rank, Client& client) {
    EXPECT_TRUE(exchange(client, first, 1000).ok());
    std::thread worker([&, owner = ::pthread_self()] {
      client.act_for(owner);
      EXPECT_TRUE(exchange(client, first, 1000).ok());
    });
    worker.join();
    if (rank == 1) std::this_thread::sleep_for(seconds(7));  // each thread has a number with the kernel
    EXPECT_TRUE(exchange(client, first, 1000).ok());
  });
}

TEST_P(AllWait, ALateRankIsWaitedForLongerThanTheTimeoutWhereThatIsSaid) {
  in_virtual_time([&] {
    connect(milliseconds(700), [](Options& options) { options.late_timeout = seconds(60); });
    cluster->each([&](std::size_t rank, Client& client) {
      if (rank == 1) pause_for(milliseconds(2'500));
      const Status status = exchange(client, first, 1000);
      EXPECT_TRUE(status.ok()) << status.message();
    });
  });
}

TEST_P(AllWait, NamesTheLayerOfAGroupThatNobodyHasStarted) {
  in_virtual_time([&] {
    connect(seconds(60), [](Options& options) { options.group_bytes = 1u << 20; });
    cluster->each([&](std::size_t, Client& client) {
      const Status status = exchange(client, first, 1000);
      EXPECT_TRUE(contains(status, "layer 'first' was waiting for layer 'second' of its group")) << status.message();
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Servers, AllWait, ::testing::Bool());

}  // namespace
}  // namespace poseidon::testing
