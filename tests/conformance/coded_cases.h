// TCP whose payloads travel coded, as cases of the suites, with TLS where the build has it.
#pragma once

#include <memory>
#include <vector>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {

inline std::unique_ptr<Transport> make_coded(Admission admission) {
  admission.coding = CodingPolicy::on;
  return make_tcp_transport(admission);
}
inline std::unique_ptr<Transport> make_tcp_coded() { return make_coded({}); }
inline std::unique_ptr<Transport> make_tls_coded() { return make_coded(admission_with_tls("the suite's own secret")); }

inline std::vector<TransportCase> coded_cases() {
  std::vector<TransportCase> all = {{"tcp_coded", make_tcp_coded, own_loopback(), true, false, 1, true},
                                    {"tcp_coded_one_loop", make_tcp_coded, own_loopback(), true, true, 1, true}};
  if (tls_available()) all.push_back({"tls_coded", make_tls_coded, own_loopback(), true, false, 1, true});
  return all;
}

}  // namespace poseidon::testing
