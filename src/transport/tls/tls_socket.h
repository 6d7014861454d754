// TlsSocket: a connected socket as OpenSSL sees it. What it writes is collected, so that several records leave in one
// system call and no write has to be repeated.
#pragma once

#ifdef POSEIDON_HAVE_OPENSSL

#include <openssl/bio.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/transfer.h"

namespace poseidon::tls {

/// One thread. Must not move while a BIO of it exists.
class TlsSocket {
 public:
  explicit TlsSocket(int socket) : socket_(socket) {}
  TlsSocket(const TlsSocket&) = delete;
  TlsSocket& operator=(const TlsSocket&) = delete;

  /// Sends what was collected; blocked: some of it is left.
  Transfer flush();
  bool has_unsent() const { return !unsent_.empty(); }
  /// The peer has closed its side of the connection, whatever TLS says about it.
  bool at_end() const { return at_end_; }
  /// The last failure's errno.
  int error() const { return error_; }

 private:
  friend class TlsSocketMethod;

  const int socket_;
  std::vector<std::byte> unsent_;
  std::size_t sent_bytes_ = 0;  // of it
  bool at_end_ = false;
  int error_ = 0;
};

/// How OpenSSL calls a TlsSocket. Immutable; thread-safe; outlives the BIOs.
class TlsSocketMethod {
 public:
  /// Null inside when there is no memory.
  TlsSocketMethod();
  explicit operator bool() const { return method_ != nullptr; }
  /// For SSL_set_bio; null when there is no memory.
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
