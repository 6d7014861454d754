// TlsSession: TLS 1.3 on one connection whose ends have proved that they know the same secret. Optional at build time
// (docs/decisions/0020-tls.md).
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

/// One thread. The socket is the owner's, connected and nonblocking; nobody else reads from it or writes to it.
class TlsSession {
 public:
  virtual ~TlsSession() = default;

  /// Goes on with TLS's own handshake; blocked: for the peer, again when the socket is readable. Before all else.
  virtual Transfer shake_hands() = 0;

  /// Encrypts and sends the pieces, one after the other, until the socket takes no more. What has been taken may be
  /// overwritten.
  virtual Transfer send(std::span<const iovec> pieces) = 0;
  /// Something that send() took is not with the system yet: send() again, of nothing too, when the socket is writable.
  virtual bool has_unsent() const = 0;

  /// Fills the pieces, one after the other, as far as what has come reaches. ended: the peer has said that nothing
  /// follows; a connection that is only cut has failed.
  virtual Transfer receive(std::span<const iovec> pieces) = 0;
  /// Something may be here already for which the socket does not become readable.
  virtual bool has_unread() const = 0;

  /// Tells the peer that nothing follows; blocked: again when the socket is writable.
  virtual Transfer finish() = 0;

  /// Why something has failed.
  virtual const std::string& failure() const = 0;
};

/// What the sessions of a process share. Immutable; thread-safe.
class TlsContext {
 public:
  virtual ~TlsContext() = default;
  /// `key`: wire::Handshake::tls_key. Holds the context.
  virtual Result<std::unique_ptr<TlsSession>> open(wire::Handshake::Role role, const Digest& key, int socket) const = 0;
};

/// With TLS_AES_128_GCM_SHA256 one key may protect 2^24.5 full records (RFC 8446, section 5.5); 2^23 are 128 GiB.
inline constexpr std::uint64_t kTlsRecordsPerKey = std::uint64_t{1} << 23;

/// After `records_per_key` sent records a session takes its next key. invalid_argument in a build without OpenSSL.
Result<std::shared_ptr<const TlsContext>> make_tls_context(std::uint64_t records_per_key = kTlsRecordsPerKey);

}  // namespace poseidon
