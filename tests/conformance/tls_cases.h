// TCP with TLS, as a case of the suites. There is no case if the build has no OpenSSL.
#pragma once

#include <memory>
#include <vector>

#include "conformance/handshakes.h"
#include "conformance/transport_fixture.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {

inline std::unique_ptr<Transport> make_tcp_with_tls() {
  return make_tcp_transport(admission_with_tls("the conformance suite's own secret"));
}

/// Makes a transport that takes a new key so often that every test covers it.
inline std::unique_ptr<Transport> make_tcp_with_new_keys() {
  return make_tcp_transport(admission_with_tls("the conformance suite's own secret", 7));
}

inline std::vector<TransportCase> tls_cases() {
  if (!tls_available()) return {};
  return {{"tls", make_tcp_with_tls, own_loopback(), true, false},
          {"tls_new_keys_one_loop", make_tcp_with_new_keys, own_loopback(), true, true}};
}

}  // namespace poseidon::testing
