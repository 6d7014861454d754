// ConnectionHandshake: the beginning of a new connection: the proof of the secret, then TLS's handshake if the
// connection is encrypted.
#pragma once

#include <memory>
#include <string>

#include "base/one_thread.h"
#include "transport/admission.h"
#include "transport/tls/tls_session.h"
#include "wire/handshake.h"

namespace poseidon {

/// One end of the handshake. Until the peer has proved that it knows the secret, nothing is allocated for it, and no
/// byte from it reaches TLS. One thread uses it.
class ConnectionHandshake {
 public:
  ConnectionHandshake(wire::Handshake::Role role, wire::Purpose purpose, const Admission& admission);

  /// Sends and receives what it can on a nonblocking connected socket, which is the same in every call. When it returns
  /// `over`, state() has the result.
  HandshakeStep advance(int socket);

  wire::Handshake::State state() const { return one_thread_.checked(proof_).state(); }
  bool names_other_secret() const { return one_thread_.checked(proof_).names_other_secret(); }
  /// wire::Handshake::key_name.
  const std::string& key_name() const { return one_thread_.checked(proof_).key_name(); }
  /// Why the handshake has failed.
  const std::string& failure() const { return one_thread_.checked(failure_); }
  /// The session, once the handshake is over and done. Null if the connection is not encrypted.
  std::unique_ptr<TlsSession> take_tls() { return std::move(one_thread_.checked(tls_)); }

 private:
  HandshakeStep failed(std::string why);

  wire::Handshake::Role role_;
  wire::Handshake proof_;
  std::shared_ptr<const TlsContext> context_;  // null: no TLS
  std::unique_ptr<TlsSession> tls_;            // exists after the proof
  std::string failure_;
  [[no_unique_address]] OneThread one_thread_{"ConnectionHandshake"};
};

}  // namespace poseidon
