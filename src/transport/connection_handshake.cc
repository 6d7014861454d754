#include "transport/connection_handshake.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/file_descriptor.h"
#include "base/wipe.h"

namespace poseidon {

ConnectionHandshake::ConnectionHandshake(wire::Handshake::Role role, wire::Purpose purpose, const Admission& admission)
    : role_(role),
      proof_(role, purpose, admission.credentials, wire::random_nonce(),
             admission.tls ? wire::Encryption::tls : wire::Encryption::none),
      context_(admission.tls) {}

HandshakeStep ConnectionHandshake::advance(int socket) {
  one_thread_.check();
  if (!tls_) {
    const HandshakeStep step = poseidon::advance(proof_, socket);
    if (step == HandshakeStep::failed) return failed(errno_text(errno));
    if (step != HandshakeStep::over || proof_.state() != wire::Handshake::State::done || !context_) return step;
    Digest key = proof_.tls_key();
    auto session = context_->open(role_, key, socket);
    wipe(key);
    if (!session.ok()) return failed(session.status().message());
    tls_ = std::move(session.value());
    const int on = 1;  // the hello follows the answer at once and must not wait until the answer is acknowledged
    static_cast<void>(::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
  }
  switch (tls_->shake_hands().outcome) {
    case Transfer::Outcome::done:
      return HandshakeStep::over;
    case Transfer::Outcome::blocked:
      return HandshakeStep::waiting;
    case Transfer::Outcome::ended:
      return HandshakeStep::ended;
    case Transfer::Outcome::failed:
      break;
  }
  return failed(tls_->failure());
}

HandshakeStep ConnectionHandshake::failed(std::string why) {
  failure_ = std::move(why);
  return HandshakeStep::failed;
}

}  // namespace poseidon
