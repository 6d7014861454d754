// Admission: whom a process lets in, and how long a stranger has to prove who it is.
#pragma once

#include <chrono>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "wire/handshake.h"

namespace poseidon {

struct Admission {
  wire::Credentials credentials;  // by default no secret
  std::chrono::milliseconds patience{5'000};
  // After which a connection is lost whose other end does not acknowledge what is sent, or takes none of it. 0: as the
  // system has it, a quarter of an hour.
  std::chrono::milliseconds silence{0};
};

/// invalid_argument where options.secret is none.
Result<Admission> admission_of(const Options& options);

/// Sends and receives what a handshake can now, on a nonblocking connected socket, and never a byte that comes after
/// it.
enum class HandshakeStep {
  waiting,  // for the peer: again when the socket is readable
  over,     // as handshake.state() says
  ended,    // by the peer
  failed,   // errno says why
};
HandshakeStep advance(wire::Handshake& handshake, int socket);

}  // namespace poseidon
