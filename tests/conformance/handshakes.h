// The handshake that a test with a plain socket does first, so that the peer accepts it.
#pragma once

#include <poll.h>

#include <string>

#include "poseidon/options.h"
#include "transport/admission.h"
#include "transport/tls/tls_session.h"
#include "wire/handshake.h"

namespace poseidon::testing {

inline Admission admission_with(const std::string& secrets) {
  Admission admission;
  admission.credentials = wire::Credentials::from_text(secrets).value();
  return admission;
}

/// Returns an admission with TLS, which the build must have.
inline Admission admission_with_tls(const std::string& secrets, std::uint64_t records_per_key = kTlsRecordsPerKey) {
  Admission admission = admission_with(secrets);
  admission.tls = make_tls_context(records_per_key).value();
  return admission;
}

/// Does a whole handshake on a connected socket, blocking or not. Returns how it ended, and `running` if the peer
/// closed the connection.
inline wire::Handshake::State shake_hands(int socket, wire::Purpose purpose = wire::Purpose::flow,
                                          const std::string& secrets = {},
                                          wire::Handshake::Role role = wire::Handshake::Role::connector) {
  wire::Handshake handshake(role, purpose, admission_with(secrets).credentials, wire::random_nonce());
  HandshakeStep step = advance(handshake, socket);
  while (step == HandshakeStep::waiting) {
    pollfd entry{socket, POLLIN, 0};
    if (::poll(&entry, 1, 10'000) <= 0) break;
    step = advance(handshake, socket);
  }
  return handshake.state();
}

inline bool let_in(int socket, wire::Purpose purpose = wire::Purpose::flow) {
  return shake_hands(socket, purpose) == wire::Handshake::State::done;
}

}  // namespace poseidon::testing
