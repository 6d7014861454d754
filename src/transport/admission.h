// Admission: which connections a process accepts, and how long a new connection has to prove that it knows the secret.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "wire/handshake.h"

namespace poseidon {

class TlsContext;

/// Pending connections are those whose peer has not proved yet that it knows a secret. A listener keeps at most this
/// number of them, and at most the next number from one source.
struct PendingLimits {
  std::size_t all = 256;
  std::size_t of_one_source = 64;
};

/// How many connections the workers of a job may open to one listener. 0: the job is not known.
std::size_t expected_connections(const Options& options);

struct Admission {
  wire::Credentials credentials;  // by default there is no secret
  std::chrono::milliseconds patience{5'000};
  PendingLimits pending_limits;  // high enough for all workers of the job at once, also from one machine
  // How long the machine at the other end may acknowledge nothing of what is sent before the connection is lost. 0
  // means the system's setting, which is a quarter of an hour.
  std::chrono::milliseconds silence{0};
  // Whether TCP connections code what they carry (coded_payload.h).
  CodingPolicy coding = CodingPolicy::off;
  // What TCP connections use after the proof. Null: they are not encrypted. Other media do not use it.
  std::shared_ptr<const TlsContext> tls;
};

/// ErrorCode::invalid_argument: options.secret is not valid, or options.tls is set without a secret or without OpenSSL.
Result<Admission> admission_of(const Options& options);

/// Sends and receives what a handshake can now, on a nonblocking connected socket. It never takes a byte that comes
/// after the handshake.
enum class HandshakeStep {
  waiting,  // for the peer; call again when the socket is readable
  over,     // handshake.state() has the result
  ended,    // the peer has closed the connection
  failed,   // errno has the reason
};
HandshakeStep advance(wire::Handshake& handshake, int socket);

}  // namespace poseidon
