// The conformance suite over TCP with TLS, where the build has it.
#include "conformance/tls_cases.h"

namespace poseidon::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Tls, TransportTest, ::testing::ValuesIn(tls_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
