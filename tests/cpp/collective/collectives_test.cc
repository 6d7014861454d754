// Collectives of a client, against what their definitions say.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/collective.h"
#include "simulation/random_calls.h"

namespace poseidon::testing {
namespace {

constexpr std::uint32_t kId = 7;

/// One rank for each letter, which names its machine, and its rack if there are racks.
std::vector<Options> on_machines(const std::string& machines, const std::string& racks = "") {
  auto all = cluster_options(static_cast<int>(machines.size()));
  for (std::size_t rank = 0; rank < machines.size(); ++rank) {
    all[rank].machine = machines.substr(rank, 1);
    if (!racks.empty()) all[rank].rack = racks.substr(rank, 1);
    all[rank].chunk_bytes = 16 << 10;  // so that small arrays have several
  }
  return all;
}

void wait_for(Client& client, const Result<std::uint64_t>& call) {
  ASSERT_TRUE(call.ok()) << call.status().message();
  const auto source = client.wait_collective(call.value(), std::chrono::milliseconds(0), always);
  ASSERT_TRUE(source.ok()) << source.status().message();
}

/// How a call ends, which may not even start if another rank has failed before.
Status end_of(Client& client, CollectiveCall call) {
  const auto started = client.start_collective(kId, std::move(call));
  if (!started.ok()) return started.status();
  return client.wait_collective(started.value(), std::chrono::milliseconds(0), always).status();
}

class CollectivesOn : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(CollectivesOn, GiveWhatTheyPromiseWhateverIsUnderWay) {
  const auto [machines, racks] = GetParam();
  TestCluster cluster(on_machines(machines, racks));
  ASSERT_TRUE(cluster.connected());
  const std::size_t ranks = cluster.clients.size();
  const auto calls = random_calls(ranks, 60, 17);
  cluster.each([&](std::size_t rank, Client& client) {
    std::vector<std::uint32_t> all(ranks);
    std::iota(all.begin(), all.end(), 0u);
    ASSERT_TRUE(client.add_communicator(kId, all).ok());
    std::mt19937 random(static_cast<unsigned>(rank));
    std::vector<Prepared> under_way;
    std::vector<Result<std::uint64_t>> started;
    under_way.reserve(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) {
      under_way.push_back(prepare(calls[i], i, rank, ranks));
      started.push_back(client.start_collective(kId, under_way.back().call));
      if (random() % 3 == 0)
        wait_for(client, started.back());  // some ranks wait where others go on
      else
        continue;
      started.back() = Status(ErrorCode::shut_down, "waited for");
    }
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (started[i].ok()) wait_for(client, started[i]);
      EXPECT_EQ(under_way[i].outputs, under_way[i].expected)
          << collective_name(calls[i].kind) << " of " << calls[i].count << " floats on rank " << rank;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Machines, CollectivesOn,
                         ::testing::Values(std::pair("a", ""), std::pair("ab", ""), std::pair("abc", ""),
                                           std::pair("aab", ""), std::pair("aabb", ""),
                                           std::pair("aabbccdd", "xxxxyyyy"), std::pair("aaa", "")));

class Collectives : public ::testing::Test {
 protected:
  static constexpr std::size_t kRanks = 3;

  Collectives() : cluster_(on_machines("abc")) {
    cluster_.each([](std::size_t, Client& client) { ASSERT_TRUE(client.add_communicator(kId, {0, 1, 2}).ok()); });
  }

  TestCluster cluster_;
};

TEST_F(Collectives, ReduceInTheMemoryOfTheirInput) {
  cluster_.each([](std::size_t rank, Client& client) {
    for (const std::size_t count : {1u, 1000u, 100'000u}) {
      auto values = given(count, count, rank);
      CollectiveCall call{.kind = CollectiveKind::all_reduce, .element = Element::float32, .divisor = 2};
      call.inputs = {bytes(values)};
      call.outputs = {bytes(values)};
      wait_for(client, client.start_collective(kId, call));
      auto expected = reduced(kRanks, count, count, ReduceOp::sum);
      for (float& value : expected) value /= 2;
      EXPECT_EQ(values, expected);
    }
  });
}

TEST_F(Collectives, WriteOverAnyOfTheirInputs) {
  cluster_.each([](std::size_t rank, Client& client) {
    for (const std::size_t count : {10u, 100'000u}) {
      for (std::size_t place = 0; place < kRanks; ++place) {  // of the result, in the memory of the inputs
        std::vector<float> memory;
        for (std::size_t to = 0; to < kRanks; ++to) {
          const auto part = given(count, place, rank, to);
          memory.insert(memory.end(), part.begin(), part.end());
        }
        CollectiveCall call{.kind = CollectiveKind::reduce_scatter, .element = Element::float32};
        const std::size_t size = count * sizeof(float);
        for (std::size_t to = 0; to < kRanks; ++to) call.inputs.push_back(bytes(memory).subspan(to * size, size));
        const std::size_t shift = place == 2 ? size / 2 : 0;  // half over one part and half over the next
        call.outputs = {bytes(memory).subspan(std::min(place, kRanks - 2) * size + shift, size)};
        wait_for(client, client.start_collective(kId, call));
        std::vector<float> result(count);
        std::memcpy(result.data(), call.outputs.front().data(), size);
        EXPECT_EQ(result, reduced(kRanks, count, place, ReduceOp::sum, rank)) << "at " << place << " of rank " << rank;
      }
    }
  });
}

TEST_F(Collectives, OfPartsOfTheRanksGoOnBesideEachOther) {
  cluster_.each([](std::size_t rank, Client& client) {
    if (rank == 1) return;
    ASSERT_TRUE(client.add_communicator(kId + 1, {2, 0}).ok());
    auto values = given(5000, 1, rank);
    CollectiveCall call{.kind = CollectiveKind::broadcast, .element = Element::float32, .root = 0};
    (rank == 2 ? call.inputs.push_back(bytes(values)) : call.outputs.push_back(bytes(values)));
    wait_for(client, client.start_collective(kId + 1, call));
    EXPECT_EQ(values, given(5000, 1, 2));
  });
}

TEST_F(Collectives, MessagesComeInOrderByTag) {
  cluster_.each([](std::size_t rank, Client& client) {
    if (rank == 2) return;
    const std::size_t counts[] = {0, 10, 100'000, 7, 50'000, 1};
    std::vector<Result<std::uint64_t>> calls;
    std::vector<std::vector<float>> arrays;
    arrays.reserve(std::size(counts));
    for (std::size_t i = 0; i < std::size(counts); ++i) {
      const auto tag = static_cast<std::uint32_t>(i % 2);
      arrays.push_back(rank == 0 ? numbers(counts[i], i) : std::vector<float>(counts[i]));
      if (rank == 0) calls.push_back(client.send(kId, 1, {tag}, bytes(arrays.back())));
    }
    if (rank == 1)  // those with the other tag first
      for (const std::size_t i : {1u, 3u, 5u, 0u, 2u, 4u}) {
        const std::uint32_t from = i == 3 ? kAnySource : 0;
        const auto call = client.receive(kId, from, {static_cast<std::uint32_t>(i % 2)}, bytes(arrays[i]));
        ASSERT_TRUE(call.ok());
        const auto source = client.wait_collective(call.value(), std::chrono::milliseconds(0), always);
        ASSERT_TRUE(source.ok()) << source.status().message();
        EXPECT_EQ(source.value(), 0u);
        EXPECT_EQ(arrays[i], numbers(counts[i], i)) << i;
      }
    for (const auto& call : calls) wait_for(client, call);
  });
}

TEST_F(Collectives, ThatDifferEndTheJobWithBothNamed) {
  std::vector<Status> ends(kRanks);
  cluster_.each([&](std::size_t rank, Client& client) {
    auto values = given(50, 1, rank);
    CollectiveCall call{.kind = CollectiveKind::all_reduce, .element = Element::float32};
    if (rank == 1) call.op = ReduceOp::max;
    call.inputs = {bytes(values)};
    call.outputs = {bytes(values)};
    ends[rank] = end_of(client, call);
  });
  for (const Status& end : ends) {
    EXPECT_EQ(end.code(), ErrorCode::mismatch);
    EXPECT_NE(end.message().find("makes another call as all_reduce of float32"), std::string::npos) << end.message();
  }
}

TEST_F(Collectives, OfOtherSizesEndTheJob) {
  std::vector<Status> ends(kRanks);
  cluster_.each([&](std::size_t rank, Client& client) {
    auto values = given(rank == 1 ? 40 : 50, 1, rank);
    CollectiveCall call{.kind = CollectiveKind::all_reduce, .element = Element::float32};
    call.inputs = {bytes(values)};
    call.outputs = {bytes(values)};
    ends[rank] = end_of(client, call);
  });
  for (const Status& end : ends) EXPECT_EQ(end.code(), ErrorCode::mismatch) << end.message();
}

TEST_F(Collectives, RefuseWhatDoesNotFit) {
  Client& client = *cluster_.clients[0];
  std::vector<float> values(10);
  const auto refusal = [&](CollectiveCall call) {
    return client.start_collective(kId, std::move(call)).status().code();
  };
  CollectiveCall call{.kind = CollectiveKind::all_reduce, .element = Element::float32};
  EXPECT_EQ(refusal(call), ErrorCode::invalid_argument) << "no arrays";
  call.inputs = {bytes(values)};
  call.outputs = {bytes(values).first(8)};
  EXPECT_EQ(refusal(call), ErrorCode::invalid_argument) << "two sizes";
  call.outputs = {bytes(values)};
  call.op = ReduceOp::band;
  EXPECT_EQ(refusal(call), ErrorCode::invalid_argument) << "bits of floats";
  call.op = ReduceOp::max;
  call.divisor = 3;
  EXPECT_EQ(refusal(call), ErrorCode::invalid_argument) << "a divided extreme";
  call.divisor = 1;
  call.kind = CollectiveKind::broadcast;
  call.root = kRanks;
  EXPECT_EQ(refusal(call), ErrorCode::invalid_argument) << "no such root";
  EXPECT_FALSE(client.add_communicator(kId, {0, 1}).ok());
  EXPECT_FALSE(client.add_communicator(kId + 1, {1, 2}).ok());
  EXPECT_FALSE(client.add_communicator(kId + 1, {0, 0}).ok());
  EXPECT_FALSE(client.send(kId, 0, {}, bytes(values)).ok());
  EXPECT_FALSE(client.receive(kId, kRanks, {}, bytes(values)).ok());
}

TEST_F(Collectives, EndWhenARankIsLost) {
  std::vector<Status> ends(kRanks);
  cluster_.each([&](std::size_t rank, Client& client) {
    if (rank == 2) return client.abort("it has had enough");
    std::vector<float> values(100'000);
    CollectiveCall call{.kind = CollectiveKind::all_reduce, .element = Element::float32};
    call.inputs = {bytes(values)};
    call.outputs = {bytes(values)};
    ends[rank] = end_of(client, call);
  });
  for (const std::size_t rank : {0u, 1u}) {
    EXPECT_EQ(ends[rank].code(), ErrorCode::aborted);
    EXPECT_NE(ends[rank].message().find("it has had enough"), std::string::npos);
  }
}

/// A call of rank 0's values of this size, for all others or from all others.
CollectiveCall rooted(CollectiveKind kind, std::size_t rank, std::vector<std::vector<float>>& memory) {
  CollectiveCall call{.kind = kind, .element = Element::float32};
  if (kind == CollectiveKind::broadcast) {
    if (rank == 0) call.inputs = {bytes(memory[0])};
    if (rank != 0) call.outputs = {bytes(memory[0])};
  } else {
    call.inputs = {bytes(memory[0])};
    if (rank == 0)
      for (std::size_t i = 0; i < 3; ++i) call.outputs.push_back(bytes(memory[i]));
  }
  return call;
}

TEST_F(Collectives, EndWhenWhoeverShouldReceiveHasLeft) {
  for (const CollectiveKind kind : {CollectiveKind::broadcast, CollectiveKind::gather}) {
    TestCluster cluster(on_machines("abc"));
    cluster.each([](std::size_t, Client& client) { ASSERT_TRUE(client.add_communicator(kId, {0, 1, 2}).ok()); });
    const std::size_t leaver = kind == CollectiveKind::broadcast ? 2 : 0;
    std::vector<Status> ends(kRanks);
    cluster.each([&](std::size_t rank, Client& client) {
      if (rank == leaver) return client.shutdown();
      std::vector<std::vector<float>> memory(kRanks, std::vector<float>(300'000));
      ends[rank] = end_of(client, rooted(kind, rank, memory));
    });
    // Rank 1 of the gather, and the root of the broadcast, have something for whoever has left.
    const std::size_t judged = kind == CollectiveKind::broadcast ? 0 : 1;
    EXPECT_EQ(ends[judged].code(), ErrorCode::peer_lost) << ends[judged].message();
  }
}

TEST_F(Collectives, OfARankThatHasDoneItsPartAndLeftComplete) {
  std::vector<float> values = given(10, 1, 0);
  Client& first = *cluster_.clients[0];
  cluster_.each([&](std::size_t rank, Client& client) {
    if (rank == 0) return;
    auto own = given(10, 1, rank);
    CollectiveCall call{.kind = CollectiveKind::reduce, .element = Element::float32};
    call.inputs = {bytes(own)};
    wait_for(client, client.start_collective(kId, call));
    client.shutdown();
  });
  CollectiveCall call{.kind = CollectiveKind::reduce, .element = Element::float32};
  call.inputs = {bytes(values)};
  call.outputs = {bytes(values)};
  wait_for(first, first.start_collective(kId, call));
  EXPECT_EQ(values, reduced(kRanks, 10, 1, ReduceOp::sum));
}

TEST_F(Collectives, FromAnySourceEndWhenAllOthersHaveLeft) {
  std::vector<float> values(10);
  Client& first = *cluster_.clients[0];
  const auto call = first.receive(kId, kAnySource, {}, bytes(values));
  ASSERT_TRUE(call.ok());
  cluster_.each([&](std::size_t rank, Client& client) {
    if (rank != 0) client.shutdown();
  });
  const auto end = first.wait_collective(call.value(), std::chrono::milliseconds(0), always);
  EXPECT_EQ(end.status().code(), ErrorCode::peer_lost) << end.status().message();
}

/// Each rank's call of two ranks; where they differ the job ends at once, although neither may send anything.
struct DifferentCalls {
  const char* what;
  CollectiveKind kinds[2];
  std::size_t counts[2];
};

TEST_F(Collectives, ThatDifferAreFoundEvenIfNobodySends) {
  const DifferentCalls all[] = {
      {"a gather and a broadcast", {CollectiveKind::gather, CollectiveKind::broadcast}, {300'000, 300'000}},
      {"a large and a small broadcast", {CollectiveKind::broadcast, CollectiveKind::broadcast}, {300'000, 1}},
      {"an empty and another broadcast", {CollectiveKind::broadcast, CollectiveKind::broadcast}, {0, 1}},
      {"an empty and another reduction", {CollectiveKind::all_reduce, CollectiveKind::all_reduce}, {0, 100'000}},
      {"an empty and a large reduction", {CollectiveKind::all_reduce, CollectiveKind::all_reduce}, {300'000, 0}},
  };
  for (const DifferentCalls& calls : all) {
    TestCluster cluster(on_machines("ab"));
    std::vector<Status> ends(2);
    cluster.each([&](std::size_t rank, Client& client) {
      ASSERT_TRUE(client.add_communicator(kId, {0, 1}).ok());
      std::vector<std::vector<float>> memory(2, std::vector<float>(calls.counts[rank]));
      CollectiveCall call{.kind = calls.kinds[rank], .element = Element::float32};
      const bool gives = calls.kinds[rank] != CollectiveKind::broadcast || rank == 0;
      if (gives) call.inputs = {bytes(memory[0])};
      if (calls.kinds[rank] == CollectiveKind::gather && rank == 0) call.outputs = {bytes(memory[0]), bytes(memory[1])};
      if (calls.kinds[rank] == CollectiveKind::all_reduce || !gives) call.outputs = {bytes(memory[0])};
      ends[rank] = end_of(client, call);
    });
    // One of them may have completed before it hears of it.
    EXPECT_TRUE(ends[0].code() == ErrorCode::mismatch || ends[1].code() == ErrorCode::mismatch)
        << calls.what << ": " << ends[0].message() << " / " << ends[1].message();
  }
}

TEST_F(Collectives, MessagesOfAnotherTypeEndTheJob) {
  std::vector<Status> ends(kRanks);
  cluster_.each([&](std::size_t rank, Client& client) {
    if (rank == 2) return;
    std::vector<float> values(10);
    const auto call =
        rank == 0 ? client.send(kId, 1, {3, 100}, bytes(values)) : client.receive(kId, 0, {3, 200}, bytes(values));
    ASSERT_TRUE(call.ok());
    ends[rank] = client.wait_collective(call.value(), std::chrono::milliseconds(0), always).status();
  });
  EXPECT_EQ(ends[1].code(), ErrorCode::mismatch);
  EXPECT_NE(ends[1].message().find("another dtype"), std::string::npos) << ends[1].message();
}

TEST_F(Collectives, AreWaitedForNoLongerThanAsked) {
  Client& client = *cluster_.clients[0];
  const auto started = client.start_collective(kId, {});
  ASSERT_TRUE(started.ok());
  const auto early = client.wait_collective(started.value(), std::chrono::milliseconds(20), always);
  EXPECT_EQ(early.status().code(), ErrorCode::timeout);
  EXPECT_FALSE(client.collective_done(started.value()));
  cluster_.each([&](std::size_t rank, Client& other) {
    if (rank != 0) wait_for(other, other.start_collective(kId, {}));
  });
  wait_for(client, started);
}

}  // namespace
}  // namespace poseidon::testing
