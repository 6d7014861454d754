// TlsSession: TLS 1.3 on one connection whose ends have proved that they know the same secret. It is optional at build
// time (docs/decisions/0020-tls.md).
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "poseidon/status.h"
#include "transport/transfer.h"
#include "wire/handshake.h"

namespace poseidon {

/// One thread at a time uses it (those that derive from it check it). The owner keeps the socket, which is connected
/// and nonblocking. Nobody else reads from it or writes to it.
class TlsSession {
 public:
  virtual ~TlsSession() = default;

  /// Continues TLS's own handshake. It must be done before any other call. blocked: the peer has to answer; call again
  /// when the socket is readable.
  virtual Transfer shake_hands() = 0;

  /// Encrypts and sends the pieces, one after the other, until the socket takes no more. The caller may overwrite what
  /// has been taken.
  virtual Transfer send(std::span<const iovec> pieces) = 0;
  /// Whether send() has taken bytes that the system does not have yet. If so, call send() again when the socket is
  /// writable, even with nothing new.
  virtual bool has_unsent() const = 0;

  /// Fills the pieces, one after the other, with what has come. ended: the peer has said that nothing follows. A
  /// connection that is only cut has failed.
  virtual Transfer receive(std::span<const iovec> pieces) = 0;
  /// Whether there may be data for which the socket does not become readable.
  virtual bool has_unread() const = 0;

  /// Tells the peer that nothing follows. blocked: call again when the socket is writable.
  virtual Transfer finish() = 0;

  /// Says why a call has failed.
  virtual const std::string& failure() const = 0;
};

/// What the sessions of a process share. Immutable and thread-safe.
class TlsContext {
 public:
  virtual ~TlsContext() = default;
  /// Opens a session, which keeps the context alive. `key` is the result of wire::Handshake::tls_key.
  virtual Result<std::unique_ptr<TlsSession>> open(wire::Handshake::Role role, const Digest& key, int socket) const = 0;
};

/// With TLS_AES_128_GCM_SHA256 one key may protect 2^24.5 full records (RFC 8446, section 5.5). 2^23 records are 128
/// GiB.
inline constexpr std::uint64_t kTlsRecordsPerKey = std::uint64_t{1} << 23;

/// A session takes its next key after `records_per_key` sent records. ErrorCode::invalid_argument: the build has no
/// OpenSSL.
Result<std::shared_ptr<const TlsContext>> make_tls_context(std::uint64_t records_per_key = kTlsRecordsPerKey);

}  // namespace poseidon
