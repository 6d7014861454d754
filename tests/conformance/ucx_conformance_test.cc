// The conformance suite over UCX, where the build has it: over its TCP, and over its shared memory.
#include "conformance/transport_fixture.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::testing {
namespace {

std::unique_ptr<Transport> make_ucx_over_tcp() { return make_ucx_transport({{"TLS", "tcp"}}); }

/// UCX leaves shared memory out where it has to tell that a peer has died, unless this is set.
std::unique_ptr<Transport> make_ucx_over_shm() {
  return make_ucx_transport({{"TLS", "posix,cma,tcp"}, {"MM_ERROR_HANDLING", "y"}});
}

std::vector<TransportCase> ucx_cases() {
  if (!ucx_available()) return {};
  return {{"ucx_tcp", make_ucx_over_tcp, "127.0.0.1:0", true, false},
          {"ucx_tcp_one_loop", make_ucx_over_tcp, "127.0.0.1:0", true, true},
          {"ucx_shm", make_ucx_over_shm, "127.0.0.1:0", true, false},
          {"ucx_shm_one_loop", make_ucx_over_shm, "127.0.0.1:0", true, true}};
}

INSTANTIATE_TEST_SUITE_P(Ucx, TransportTest, ::testing::ValuesIn(ucx_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace poseidon::testing
