// What a test that holds a plain socket does first, to be let in.
#pragma once

#include <poll.h>

#include <string>

#include "transport/admission.h"
#include "wire/handshake.h"

namespace poseidon::testing {

inline Admission admission_with(const std::string& secrets) {
  Admission admission;
  admission.credentials = wire::Credentials::from_text(secrets).value();
  return admission;
}

/// A whole handshake on a connected socket, blocking or not. How it ended; running: the peer went away.
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
