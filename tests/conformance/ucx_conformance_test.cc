// The conformance suite over UCX, where the build has it: over its TCP, and over its shared memory.
#include "conformance/ucx_cases.h"

namespace poseidon::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Ucx, TransportTest, ::testing::ValuesIn(ucx_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
