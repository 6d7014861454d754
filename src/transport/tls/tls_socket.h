// TlsSocket: a connected socket as OpenSSL uses it. It collects what OpenSSL writes. So several records leave in one
// system call, and no write has to be repeated.
#pragma once

#ifdef POSEIDON_HAVE_OPENSSL

#include <openssl/bio.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "base/one_thread.h"
#include "base/pinned.h"
#include "transport/transfer.h"

namespace poseidon::tls {

/// One thread at a time uses it. It must not move while it has a BIO.
class TlsSocket : private Pinned {
 public:
  explicit TlsSocket(int socket) : socket_(socket) {}

  /// Sends what was collected. blocked: a part of it is left.
  Transfer flush();
  bool has_unsent() const {
    const OneThread::Turn turn(one_thread_);
    return !unsent_.empty();
  }
  /// Whether the peer has closed its side of the connection, whatever TLS says about it.
  bool at_end() const {
    const OneThread::Turn turn(one_thread_);
    return at_end_;
  }
  /// Returns the errno of the last failure.
  int error() const {
    const OneThread::Turn turn(one_thread_);
    return error_;
  }

 private:
  friend class TlsSocketMethod;

  const int socket_;
  std::vector<std::byte> unsent_;
  std::size_t sent_bytes_ = 0;  // how much of `unsent_` has been sent
  bool at_end_ = false;
  int error_ = 0;
  [[no_unique_address]] OneThread one_thread_{"TlsSocket"};
};

/// Tells OpenSSL how to use a TlsSocket. Immutable and thread-safe. It must outlive the BIOs.
class TlsSocketMethod {
 public:
  /// Converts to false if there is no memory.
  TlsSocketMethod();
  explicit operator bool() const { return method_ != nullptr; }
  /// Returns a BIO for SSL_set_bio, or null if there is no memory.
  BIO* new_bio(TlsSocket& socket) const;

 private:
  static int write(BIO* bio, const char* from, std::size_t size, std::size_t* written);
  static int read(BIO* bio, char* to, std::size_t size, std::size_t* got);
  static long control(BIO* bio, int command, long number, void* pointer);

  struct Free {
    void operator()(BIO_METHOD* method) const { BIO_meth_free(method); }
  };
  std::unique_ptr<BIO_METHOD, Free> method_;
};

}  // namespace poseidon::tls

#endif  // POSEIDON_HAVE_OPENSSL
