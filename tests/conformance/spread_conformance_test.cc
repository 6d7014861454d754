// The conformance suite over transports whose bytes other loops move.
#include "conformance/spread_cases.h"

namespace poseidon::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Spread, TransportTest, ::testing::ValuesIn(spread_cases(false)),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
