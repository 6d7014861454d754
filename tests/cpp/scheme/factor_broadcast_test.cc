// sfb: which factors of a peer it accepts, and how it stores them.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "scheme/peer_broadcast.h"

namespace poseidon {
namespace {

constexpr std::size_t kLayerRows = 4;
constexpr std::size_t kLayerCols = 6;

class FactorBroadcastTest : public ::testing::Test {
 protected:
  FactorBroadcastTest() {
    unit_.name = "weights";
    unit_.size_bytes = kLayerRows * kLayerCols * sizeof(float);
    exchange_.about.unit = &unit_;
    exchange_.about.rows = kLayerRows;
    exchange_.about.cols = kLayerCols;
    inbox_.parts.resize(3);
    links_.worker_count = 3;
    links_.pool = std::make_shared<BufferPool>();
  }

  static wire::Contribution factors(std::uint32_t factor_count) {
    wire::Contribution factors;
    factors.kind = wire::Kind::factors;
    factors.rank = 1;
    factors.rows = kLayerRows;
    factors.cols = kLayerCols;
    factors.factor_count = factor_count;
    factors.payload_bytes = factor_count * (kLayerRows + kLayerCols) * sizeof(float);
    return factors;
  }

  void expect_refused(const wire::Contribution& wrong, const std::string& word) {
    const auto room = scheme_.make_room(inbox_, exchange_, wrong.make(), links_);
    EXPECT_EQ(room.status().code(), ErrorCode::mismatch);
    EXPECT_NE(room.status().message().find(word), std::string::npos) << room.status().message();
    EXPECT_NE(room.status().message().find("rank 1"), std::string::npos);
  }

  Unit unit_;
  Exchange exchange_;
  const PeerBroadcast& scheme_ = peer_broadcast_of(wire::Kind::factors);
  PeerInbox inbox_;
  Links links_;
};

TEST_F(FactorBroadcastTest, MakesRoomForWhatFits) {
  const auto room_bytes = [this](const wire::Contribution& one) {
    inbox_.parts[1] = Part();
    return scheme_.make_room(inbox_, exchange_, one.make(), links_).value().size();
  };
  EXPECT_EQ(room_bytes(factors(3)), 3 * (kLayerRows + kLayerCols) * sizeof(float));
  wire::Contribution narrow = factors(3);
  narrow.dtype = DType::bfloat16;
  narrow.payload_bytes /= 2;
  EXPECT_EQ(room_bytes(narrow), 3 * (kLayerRows + kLayerCols) * sizeof(float) / 2);
  wire::Contribution dense = factors(wire::kUnboundedFactors);
  dense.dense = true;
  dense.payload_bytes = unit_.size_bytes;
  EXPECT_EQ(room_bytes(dense), unit_.size_bytes);
}

TEST_F(FactorBroadcastTest, RefusesWhatDoesNotFit) {
  wire::Contribution wrong = factors(3);
  wrong.rows = kLayerCols;
  wrong.cols = kLayerRows;
  expect_refused(wrong, "shape");
  wrong = factors(3);
  wrong.payload_bytes -= 4;
  expect_refused(wrong, "size");
  wrong = factors(3);
  wrong.dtype = DType::int32;
  expect_refused(wrong, "dtype");
  wrong = factors(3);
  wrong.dtype = DType::float64;  // wider than the layer
  wrong.payload_bytes *= 2;
  expect_refused(wrong, "dtype");
  wrong = factors(3);
  wrong.absent = true;  // and yet a payload
  expect_refused(wrong, "size");
  wrong = factors(wire::kUnboundedFactors);
  wrong.dense = true;
  wrong.payload_bytes = unit_.size_bytes + 4;
  expect_refused(wrong, "size");
  wrong.payload_bytes = unit_.size_bytes;
  wrong.dtype = DType::int32;
  expect_refused(wrong, "dtype");
  wrong = factors(wire::kUnboundedFactors);  // overflows any size
  wrong.payload_bytes = 0;
  expect_refused(wrong, "size");
}

TEST_F(FactorBroadcastTest, RefusesASecondPart) {
  wire::Contribution absent = factors(0);
  absent.absent = true;
  ASSERT_TRUE(scheme_.make_room(inbox_, exchange_, absent.make(), links_).ok());
  ASSERT_TRUE(scheme_.store(inbox_, exchange_, absent.make(), {}, links_).ok());
  EXPECT_FALSE(inbox_.parts[1].present);
  EXPECT_EQ(inbox_.arrived_count, 1u);
  expect_refused(factors(1), "twice");
}

TEST_F(FactorBroadcastTest, RefusesASecondPartWhileTheFirstIsBeingReceived) {
  const auto room = scheme_.make_room(inbox_, exchange_, factors(3).make(), links_);
  ASSERT_TRUE(room.ok());
  expect_refused(factors(3), "twice");
  expect_refused(factors(2), "twice");
  std::ranges::fill(room.value(), std::byte{1});  // the transport goes on: the memory is still there
  EXPECT_EQ(inbox_.parts[1].buffer.data(), room.value().data());
}

TEST_F(FactorBroadcastTest, LeftRowsComeBeforeRightRows) {
  const wire::Header two = factors(2).make();
  const auto room = scheme_.make_room(inbox_, exchange_, two, links_);
  ASSERT_TRUE(room.ok());
  ASSERT_TRUE(scheme_.store(inbox_, exchange_, two, room.value(), links_).ok());
  const Part& part = inbox_.parts[1];
  ASSERT_EQ(part.terms.size(), 1u);
  EXPECT_EQ(part.terms[0].left, room.value().data());
  EXPECT_EQ(part.terms[0].right, room.value().data() + 2 * kLayerRows * sizeof(float));
  EXPECT_EQ(part.terms[0].count, 2u);
  EXPECT_TRUE(part.present);
}

TEST_F(FactorBroadcastTest, SendsNothingToAPeerThatHasLeft) {
  links_.peers.assign(3, {nullptr});
  exchange_.operation = Push{.gradient = NoGradient{}};
  scheme_.start(exchange_, links_);
  EXPECT_EQ(exchange_.progress.inbox_of<PeerInbox>().arrived_count, 1u) << "its own part";
  EXPECT_EQ(exchange_.progress.sends_pending, 0u);
}

TEST_F(FactorBroadcastTest, NamesWhoIsMissing) {
  auto& parts = exchange_.progress.inbox.emplace<PeerInbox>().parts;
  parts.resize(3);
  parts[1].arrived = true;
  EXPECT_NE(scheme_.waiting_for(exchange_, links_).find("rank 0, 2"), std::string::npos);
}

}  // namespace
}  // namespace poseidon
