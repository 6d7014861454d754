// Messages of a lower level overtake what waits to be sent, over every transport where something waits.
#include <map>
#include <random>
#include <thread>

#include "conformance/coded_cases.h"
#include "conformance/spread_cases.h"
#include "conformance/tls_cases.h"
#include "conformance/transport_fixture.h"
#include "conformance/ucx_cases.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kBulkBytes = std::size_t{1} << 20;
constexpr std::uint32_t kBulkCount = 32;  // MiB: more than any medium takes from a sender that nobody receives from
constexpr std::uint16_t kBulkLevel = 500;

wire::Header header_of(std::uint32_t chunk, std::uint16_t level) {
  wire::Header header = push_header(chunk);
  header.priority = level;
  return header;
}

class TransportPriority : public TransportTest {
 protected:
  /// A pair whose server does not receive yet, and more on the client's way to it than the medium takes.
  Pair held_back_pair(std::uint16_t level = kBulkLevel) {
    Pair pair = connected_pair();
    pair.client->receive();
    for (std::uint32_t i = 0; i < kBulkCount; ++i) pair.client->send(header_of(i, level), bulk_);
    return pair;
  }

  /// Waits until the medium takes no more; how many messages it has taken.
  static std::size_t taken(End& sender) {
    std::size_t count = 0;
    for (int unchanged = 0; unchanged < 3; ++unchanged) {
      std::this_thread::sleep_for(milliseconds(30));  // nothing says that the kernel takes no more
      sender.loop().call([] {});                      // it is not the loop that had no turn
      if (std::exchange(count, sender.sends.done_count()) != count) unchanged = 0;
    }
    return count;
  }

  static std::vector<std::uint32_t> chunks_of(const std::vector<Received>& messages) {
    std::vector<std::uint32_t> chunks;
    for (const Received& message : messages) chunks.push_back(message.header.chunk);
    return chunks;
  }

  const Bytes bulk_ = pattern(kBulkBytes, 1);
  const Bytes small_ = pattern(1000, 2);
};

TEST_P(TransportPriority, WhatIsHeldComesLaterAndInOrder) {
  Pair pair = receiving_pair();
  const auto hold = [&pair](milliseconds time) { pair.client->loop().call([&] { pair.client->flow().hold(time); }); };
  for (std::uint32_t i = 0; i < 8; ++i) {
    pair.client->send(push_header(i), bulk_);
    hold(milliseconds(i % 2 == 0 ? 5 : 0));
  }
  ASSERT_TRUE(pair.server->recorder.wait_messages(8));
  const auto messages = pair.server->recorder.messages();
  for (std::uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(messages[i].header.chunk, i);
    EXPECT_EQ(messages[i].payload, bulk_);
  }
  hold(seconds(600));
  pair.client->send(push_header(8), bulk_);
  const auto before = Clock::now();
  pair.client->close(seconds(20));
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_LT(Clock::now() - before, seconds(10)) << "who leaves waits for no hold";
  EXPECT_EQ(pair.server->recorder.messages().size(), 9u);
}

TEST_P(TransportPriority, AnUrgentMessageOvertakesWhatWaits) {
  Pair pair = held_back_pair();
  const std::size_t taken_count = taken(*pair.client);
  ASSERT_LT(taken_count + GetParam().begun_count, kBulkCount) << "nothing waits";
  constexpr std::uint32_t kUrgent = 1000;
  pair.client->send(header_of(kUrgent, kBulkLevel - 1), small_);
  pair.client->loop().call([] {});
  pair.server->receive();
  ASSERT_TRUE(pair.server->recorder.wait_messages(kBulkCount + 1));
  const auto messages = pair.server->recorder.messages();
  const auto chunks = chunks_of(messages);
  const auto at = static_cast<std::size_t>(std::ranges::find(chunks, kUrgent) - chunks.begin());
  EXPECT_LE(at, taken_count + GetParam().begun_count);
  std::uint32_t next = 0;  // the others in their order, those that had begun uncut
  for (const Received& message : messages) {
    if (message.header.chunk != kUrgent) EXPECT_EQ(message.header.chunk, next++);
    EXPECT_TRUE(message.payload == (message.header.chunk == kUrgent ? small_ : bulk_)) << message.header.chunk;
  }
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], kBulkCount + 1);
}

TEST_P(TransportPriority, AMessageThatHasBegunIsNotCut) {
  const Bytes large = pattern(32 * kBulkBytes, 3);
  Pair pair = connected_pair();
  pair.client->receive();
  pair.client->send(header_of(0, wire::kLastPriority), large);
  EXPECT_EQ(taken(*pair.client), 0u);
  pair.client->send(header_of(1, wire::kFirstPriority), small_);
  pair.client->loop().call([] {});
  pair.server->receive();
  ASSERT_TRUE(pair.server->recorder.wait_messages(2));
  const auto messages = pair.server->recorder.messages();
  EXPECT_EQ(chunks_of(messages), (std::vector<std::uint32_t>{0, 1}));
  EXPECT_TRUE(messages[0].payload == large);
  EXPECT_TRUE(messages[1].payload == small_);
}

/// Sends messages of random levels behind what waits already; their numbers in the order in which they must come.
std::vector<std::uint32_t> send_mixed(End& sender, const Bytes& payload, std::uint32_t first, std::uint32_t count) {
  std::mt19937 random(5);
  std::multimap<std::uint16_t, std::uint32_t> order;  // equal keys keep the order in which they came
  for (std::uint32_t i = 0; i < count; ++i) {
    const bool last = i == count / 2;  // a goodbye, in the middle
    const auto level =
        last ? wire::kLastPriority : static_cast<std::uint16_t>(kBulkLevel + 1 + random() % (i % 2 == 0 ? 3 : 500));
    sender.send(header_of(first + i, level), payload);
    order.emplace(level, first + i);
  }
  std::vector<std::uint32_t> chunks;
  for (const auto& [level, chunk] : order) chunks.push_back(chunk);
  return chunks;
}

TEST_P(TransportPriority, WhatWaitsLeavesByLevelAndEqualOnesInOrder) {
  constexpr std::uint32_t kMixed = 300;
  Pair pair = held_back_pair();
  auto expected = send_mixed(*pair.client, small_, kBulkCount, kMixed);
  ASSERT_LT(taken(*pair.client) + GetParam().begun_count, kBulkCount) << "some of it has left before the rest came";
  pair.server->receive();
  ASSERT_TRUE(pair.server->recorder.wait_messages(kBulkCount + kMixed));
  auto chunks = chunks_of(pair.server->recorder.messages());
  for (std::uint32_t i = 0; i < kBulkCount; ++i) ASSERT_EQ(chunks[i], i);
  EXPECT_EQ(std::vector<std::uint32_t>(chunks.begin() + kBulkCount, chunks.end()), expected);
  EXPECT_EQ(chunks.back(), kBulkCount + kMixed / 2) << "goodbye comes last";
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], kBulkCount + kMixed);
}

TEST_P(TransportPriority, CloseSendsAllThatWaitsByLevel) {
  constexpr std::uint32_t kMixed = 100;
  Pair pair = held_back_pair();
  auto expected = send_mixed(*pair.client, small_, kBulkCount, kMixed);
  pair.client->close(seconds(20));
  pair.server->receive();
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
  EXPECT_EQ(pair.server->recorder.wait_closed().code(), ErrorCode::peer_lost);
  const auto chunks = chunks_of(pair.server->recorder.messages());
  ASSERT_EQ(chunks.size(), kBulkCount + kMixed);
  EXPECT_EQ(std::vector<std::uint32_t>(chunks.begin() + kBulkCount, chunks.end()), expected);
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], kBulkCount + kMixed);
}

TEST_P(TransportPriority, WhatWaitsIsDoneOnceWhenThePeerDies) {
  Pair pair = held_back_pair();
  send_mixed(*pair.client, small_, kBulkCount, 100);
  pair.client->loop().call([] {});  // all are sent before the peer goes
  pair.server.reset();
  EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
  EXPECT_EQ(pair.client->sends.done_count(), kBulkCount + 100) << "before on_closed";
  auto codes = pair.client->sends.codes();
  EXPECT_GE(codes[ErrorCode::peer_lost], 100u);
  EXPECT_EQ(codes[ErrorCode::peer_lost] + codes[ErrorCode::ok], kBulkCount + 100);
}

TEST_P(TransportPriority, WhatWaitsIsDoneOnceWhenTheLingerEnds) {
  Pair pair = held_back_pair();
  send_mixed(*pair.client, small_, kBulkCount, 100);
  pair.client->close(milliseconds(50));
  EXPECT_TRUE(pair.client->recorder.wait_closed().ok());
  EXPECT_EQ(pair.client->sends.done_count(), kBulkCount + 100) << "before on_closed";
  EXPECT_GE(pair.client->sends.codes()[ErrorCode::shut_down], 100u);
}

TEST_P(TransportPriority, RandomTrafficStaysWholeAndInOrderWithinEachLevel) {
  constexpr std::uint32_t kCount = 3000;
  constexpr std::uint16_t kLevels = 5;
  std::mt19937 random(9);
  Pair pair = receiving_pair();
  const auto payload_of = [this](std::uint32_t chunk) {
    return std::span(bulk_).subspan(chunk, chunk % 7 == 0 ? 200'000 : chunk % 3000);
  };
  for (std::uint32_t i = 0; i < kCount; ++i) {
    pair.client->send(header_of(i, static_cast<std::uint16_t>(random() % kLevels)), {payload_of(i)});
    if (random() % 100 == 0) pair.client->loop().call([] {});
  }
  ASSERT_TRUE(pair.server->recorder.wait_messages(kCount));
  std::map<std::uint16_t, std::uint32_t> last;
  std::vector<bool> seen(kCount, false);
  for (const Received& message : pair.server->recorder.messages()) {
    const std::uint32_t chunk = message.header.chunk;
    ASSERT_FALSE(seen.at(chunk));
    seen[chunk] = true;
    ASSERT_TRUE(std::ranges::equal(message.payload, payload_of(chunk))) << chunk;
    const auto [before, first] = last.try_emplace(message.header.priority, chunk);
    if (!first) ASSERT_LT(std::exchange(before->second, chunk), chunk) << "level " << message.header.priority;
  }
  ASSERT_TRUE(pair.client->sends.wait_all());
  EXPECT_EQ(pair.client->sends.codes()[ErrorCode::ok], kCount);
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportPriority,
                         ::testing::Values(TransportCase{"tcp", make_tcp_transport, own_loopback(), true, false},
                                           TransportCase{"tcp_one_loop", make_tcp_transport, own_loopback(), true,
                                                         true},
                                           TransportCase{"shm", make_shm_transport, "shm:0", false, false},
                                           TransportCase{"shm_one_loop", make_shm_transport, "shm:0", false, true}),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Spread, TransportPriority, ::testing::ValuesIn(spread_cases(true)),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Tls, TransportPriority, ::testing::ValuesIn(tls_cases()),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Coded, TransportPriority, ::testing::ValuesIn(coded_cases()),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Ucx, TransportPriority, ::testing::ValuesIn(ucx_cases()),
                         [](const auto& tested) { return tested.param.name; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportPriority);

}  // namespace
}  // namespace poseidon::testing
