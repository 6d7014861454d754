// The conformance suite over TCP with coded payloads.
#include "conformance/coded_cases.h"

namespace poseidon::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Coded, TransportTest, ::testing::ValuesIn(coded_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
