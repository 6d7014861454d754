#include "transport/admission.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/file_descriptor.h"
#include "transport/tls/tls_session.h"

namespace poseidon {

namespace {
constexpr std::chrono::milliseconds kShortestSilence{1'000};  // a busy machine may be silent for as long
}

std::size_t expected_connections(const Options& options) {
  const auto lanes = static_cast<std::size_t>(options.priority_classes) * static_cast<std::size_t>(options.flows);
  return static_cast<std::size_t>(std::max(0, options.world_size)) * lanes;
}

Result<Admission> admission_of(const Options& options) {
  auto credentials = wire::Credentials::from_text(options.secret);
  if (!credentials.ok()) return credentials.status();
  Admission admission;
  admission.credentials = std::move(credentials.value());
  admission.patience = std::min(admission.patience, options.timeout);
  admission.silence = std::max(options.timeout, kShortestSilence);
  admission.coding = options.coding;
  PendingLimits& limits = admission.pending_limits;
  limits.of_one_source = std::max(limits.of_one_source, expected_connections(options));
  limits.all = std::max(limits.all, 2 * limits.of_one_source);
  if (!options.tls) return admission;
  if (!admission.credentials.has_secret())
    return Status(ErrorCode::invalid_argument,
                  "tls=on needs a secret, from which its keys are made; give all processes the same POSEIDON_SECRET or "
                  "secret_file");
  auto context = make_tls_context();
  if (!context.ok()) return context.status();
  admission.tls = std::move(context.value());
  return admission;
}

HandshakeStep advance(wire::Handshake& handshake, int socket) {
  for (;;) {
    // The few bytes of a handshake always fit into a socket that has sent nothing else.
    const auto out = handshake.take_outgoing();
    if (!out.empty() &&
        ::send(socket, out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(out.size()))
      return HandshakeStep::failed;
    const std::size_t wanted_bytes = handshake.wanted_bytes();
    if (wanted_bytes == 0) return HandshakeStep::over;
    std::array<std::byte, wire::kLongestHandshakeBytes> bytes{};
    const ssize_t got = ::recv(socket, bytes.data(), wanted_bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return would_block(errno) ? HandshakeStep::waiting : HandshakeStep::failed;
    if (got == 0) return HandshakeStep::ended;
    handshake.receive(std::span(bytes).first(static_cast<std::size_t>(got)));
  }
}

}  // namespace poseidon
