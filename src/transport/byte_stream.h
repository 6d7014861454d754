// ByteStream: the bytes of a connected socket, through TLS where it has a session.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>

#include "base/file_descriptor.h"
#include "transport/tls/tls_session.h"
#include "transport/transfer.h"

namespace poseidon {

/// One thread. Nothing blocks; nothing raises SIGPIPE.
class ByteStream {
 public:
  ByteStream() = default;
  /// `tls`: of this socket, its handshake over; null: the bytes go as they are.
  explicit ByteStream(FileDescriptor socket, std::unique_ptr<TlsSession> tls = nullptr)
      : socket_(std::move(socket)), tls_(std::move(tls)) {}

  int socket() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  bool encrypted() const { return tls_ != nullptr; }

  /// Takes what it can of the pieces, one after the other. Fewer bytes than all: the socket is full.
  Transfer send(std::span<iovec> pieces);
  /// Something that was taken is not with the system yet: send() again, of nothing too, when the socket is writable.
  bool has_unsent() const { return tls_ && tls_->has_unsent(); }
  /// Nothing follows: the peer will read the end of the stream. False: again when the socket is writable.
  bool finish();

  /// Fills the pieces, one after the other. Fewer bytes than asked for: there is no more at the moment.
  Transfer receive(std::span<iovec> pieces);
  /// Something may be here already for which the socket does not become readable.
  bool has_unread() const { return tls_ && tls_->has_unread(); }

  /// Why something has just failed.
  std::string failure() const { return tls_ ? tls_->failure() : errno_text(error_); }

  /// At once, and whatever is under way.
  void close();

 private:
  FileDescriptor socket_;
  std::unique_ptr<TlsSession> tls_;  // goes before the socket
  int error_ = 0;
};

}  // namespace poseidon
