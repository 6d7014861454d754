// The media over which UCX is tested. There are none if the build has no UCX.
#pragma once

#include <memory>
#include <vector>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon::testing {

inline std::unique_ptr<Transport> make_ucx_over_tcp() { return make_ucx_transport({{"TLS", "tcp"}}); }

inline std::unique_ptr<Transport> make_ucx_with_secret() {
  return make_ucx_transport({{"TLS", "tcp"}}, admission_with("the conformance suite's own secret"));
}

/// Unless this is set, UCX does not use shared memory when it has to notice that a peer has died.
inline std::unique_ptr<Transport> make_ucx_over_shm() {
  return make_ucx_transport({{"TLS", "posix,cma,tcp"}, {"MM_ERROR_HANDLING", "y"}});
}

inline std::vector<TransportCase> ucx_cases() {
  if (!ucx_available()) return {};
  return {{"ucx_tcp", make_ucx_over_tcp, "127.0.0.1:0", true, false, 2},
          {"ucx_tcp_secret", make_ucx_with_secret, "127.0.0.1:0", true, false, 2},
          {"ucx_tcp_one_loop", make_ucx_over_tcp, "127.0.0.1:0", true, true, 2},
          {"ucx_shm", make_ucx_over_shm, "127.0.0.1:0", true, false, 2},
          {"ucx_shm_one_loop", make_ucx_over_shm, "127.0.0.1:0", true, true, 2}};
}

}  // namespace poseidon::testing
