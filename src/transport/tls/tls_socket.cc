#ifdef POSEIDON_HAVE_OPENSSL

#include "transport/tls/tls_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <span>

#include "base/file_descriptor.h"

namespace poseidon::tls {

namespace {

TlsSocket& socket_of(BIO* bio) { return *static_cast<TlsSocket*>(BIO_get_data(bio)); }

}  // namespace

Transfer TlsSocket::flush() {
  const OneThread::Turn turn(one_thread_);
  while (sent_bytes_ < unsent_.size()) {
    const auto rest = std::span(unsent_).subspan(sent_bytes_);
    const ssize_t sent = ::send(socket_, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      error_ = errno;
      return {would_block(error_) ? Transfer::Outcome::blocked : Transfer::Outcome::failed};
    }
    sent_bytes_ += static_cast<std::size_t>(sent);
  }
  unsent_.clear();
  sent_bytes_ = 0;
  return {};
}

TlsSocketMethod::TlsSocketMethod() : method_(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "poseidon")) {
  if (!method_) return;
  BIO_meth_set_write_ex(method_.get(), write);
  BIO_meth_set_read_ex(method_.get(), read);
  BIO_meth_set_ctrl(method_.get(), control);
}

BIO* TlsSocketMethod::new_bio(TlsSocket& socket) const {
  BIO* const bio = BIO_new(method_.get());
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, &socket);
  BIO_set_init(bio, 1);
  return bio;
}

int TlsSocketMethod::write(BIO* bio, const char* from, std::size_t size, std::size_t* written) {
  const auto bytes = std::as_bytes(std::span(from, size));
  auto& unsent = socket_of(bio).unsent_;
  unsent.insert(unsent.end(), bytes.begin(), bytes.end());
  *written = size;
  return 1;
}

int TlsSocketMethod::read(BIO* bio, char* to, std::size_t size, std::size_t* got) {
  TlsSocket& self = socket_of(bio);
  BIO_clear_retry_flags(bio);
  *got = 0;
  ssize_t count;
  do {
    count = ::recv(self.socket_, to, size, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count > 0) {
    *got = static_cast<std::size_t>(count);
    return 1;
  }
  if (count == 0) {
    self.at_end_ = true;
    return 0;
  }
  self.error_ = errno;
  if (would_block(self.error_)) BIO_set_retry_read(bio);
  return -1;
}

long TlsSocketMethod::control(BIO* bio, int command, long /*number*/, void* /*pointer*/) {
  if (command == BIO_CTRL_EOF) return socket_of(bio).at_end_ ? 1 : 0;
  return command == BIO_CTRL_FLUSH ? 1 : 0;  // TlsSocket::flush sends the data, so BIO_CTRL_FLUSH has nothing to do
}

}  // namespace poseidon::tls

#endif  // POSEIDON_HAVE_OPENSSL
