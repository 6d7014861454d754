// Admission: whom a process lets in, and how long a new connection has to prove that it may come in.
#pragma once

#include <chrono>
#include <memory>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "wire/handshake.h"

namespace poseidon {

class TlsContext;

struct Admission {
  wire::Credentials credentials;  // by default no secret
  std::chrono::milliseconds patience{5'000};
  // After which a connection is lost whose other end does not acknowledge what is sent, or takes none of it. 0: as the
  // system has it, a quarter of an hour.
  std::chrono::milliseconds silence{0};
  // What TCP connections go on with after the proof; null: they are not encrypted. Other media have no use for it.
  std::shared_ptr<const TlsContext> tls;
};

/// invalid_argument where options.secret is none, or options.tls is on without one or without OpenSSL.
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
