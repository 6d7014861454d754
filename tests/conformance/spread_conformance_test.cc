// The conformance suite over transports whose bytes other loops move.
#include "conformance/spread_cases.h"

namespace poseidon::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Spread, TransportTest, ::testing::ValuesIn(spread_cases(false)),
                         [](const auto& tested) { return tested.param.name; });

/// What is sent after the end fails, and its memory is free again even if nobody keeps the flow any more.
TEST_P(TransportTest, SendsAfterTheEndAreDoneThoughTheFlowIsDropped) {
  const Bytes payload = pattern(1000, 1);
  for (int round = 0; round < 50; ++round) {
    Pair pair = receiving_pair();
    pair.server->close(milliseconds(0));
    EXPECT_EQ(pair.client->recorder.wait_closed().code(), ErrorCode::peer_lost);
    for (std::uint32_t i = 0; i < 3; ++i) pair.client->send(push_header(i), payload);
    // Both ends are dropped without a look at what has become of these; ~End waits for them.
  }
}

}  // namespace
}  // namespace poseidon::testing
