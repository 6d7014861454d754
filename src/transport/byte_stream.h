// ByteStream: the bytes of a connected socket, through TLS where it has a session.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>

#include "base/file_descriptor.h"
#include "base/one_thread.h"
#include "transport/tls/tls_session.h"
#include "transport/transfer.h"

namespace poseidon {

/// One thread at a time uses it. No call blocks or raises SIGPIPE.
class ByteStream {
 public:
  ByteStream() = default;
  /// `tls` is the session of this socket, after its handshake. If it is null, the bytes are not encrypted.
  explicit ByteStream(FileDescriptor socket, std::unique_ptr<TlsSession> tls = nullptr)
      : socket_(std::move(socket)), tls_(std::move(tls)) {}

  int socket() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  bool encrypted() const { return tls_ != nullptr; }

  /// Takes as much of the pieces as it can, one after the other. If it takes fewer bytes than all, the socket is full.
  Transfer send(std::span<iovec> pieces);
  /// Whether taken bytes are not with the system yet. Then call send() again when the socket is writable, even with
  /// nothing to send.
  bool has_unsent() const {
    const OneThread::Turn turn(one_thread_);
    return tls_ && tls_->has_unsent();
  }
  /// Ends the stream for the peer's reader. If it returns false, call it again when the socket is writable.
  bool finish();

  /// Fills the pieces, one after the other. If it fills fewer bytes than asked for, there are no more at the moment.
  Transfer receive(std::span<iovec> pieces);
  /// Whether bytes may have arrived for which the socket does not become readable.
  bool has_unread() const {
    const OneThread::Turn turn(one_thread_);
    return tls_ && tls_->has_unread();
  }

  /// Why the last call has failed.
  std::string failure() const {
    const OneThread::Turn turn(one_thread_);
    return tls_ ? tls_->failure() : errno_text(error_);
  }

  /// Closes at once, even if something is still being sent.
  void close();

 private:
  FileDescriptor socket_;
  std::unique_ptr<TlsSession> tls_;  // destroyed before the socket
  int error_ = 0;
  [[no_unique_address]] OneThread one_thread_{"ByteStream"};
};

}  // namespace poseidon
