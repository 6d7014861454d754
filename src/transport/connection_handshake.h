// ConnectionHandshake: what a new connection begins with: the proof of the secret, then TLS's handshake where it is
// encrypted.
#pragma once

#include <memory>
#include <string>

#include "transport/admission.h"
#include "transport/tls/tls_session.h"
#include "wire/handshake.h"

namespace poseidon {

/// One end of it. Before the peer has proved that it knows the secret, nothing is allocated and no byte of it gets to
/// TLS. One thread.
class ConnectionHandshake {
 public:
  ConnectionHandshake(wire::Handshake::Role role, wire::Purpose purpose, const Admission& admission);

  /// On a nonblocking connected socket, always the same. over: as state() says.
  HandshakeStep advance(int socket);

  wire::Handshake::State state() const { return proof_.state(); }
  /// wire::Handshake::key_name.
  const std::string& key_name() const { return proof_.key_name(); }
  /// Why it has failed.
  const std::string& failure() const { return failure_; }
  /// Once it is over and done; null: the connection is not encrypted.
  std::unique_ptr<TlsSession> take_tls() { return std::move(tls_); }

 private:
  HandshakeStep failed(std::string why);

  wire::Handshake::Role role_;
  wire::Handshake proof_;
  std::shared_ptr<const TlsContext> context_;  // null: no TLS
  std::unique_ptr<TlsSession> tls_;            // from when the proof is done
  std::string failure_;
};

}  // namespace poseidon
