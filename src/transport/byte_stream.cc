#include "transport/byte_stream.h"

#include <sys/socket.h>

#include <cerrno>

namespace poseidon {

namespace {

msghdr message_of(std::span<iovec> pieces) {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  return message;
}

/// Returns the result for a system call that has failed.
Transfer stopped(int error) { return {would_block(error) ? Transfer::Outcome::blocked : Transfer::Outcome::failed}; }

}  // namespace

Transfer ByteStream::send(std::span<iovec> pieces) {
  const OneThread::Turn turn(one_thread_);
  if (tls_) return tls_->send(pieces);
  const msghdr message = message_of(pieces);
  for (;;) {
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return {Transfer::Outcome::done, static_cast<std::size_t>(sent)};
    error_ = errno;
    if (error_ != EINTR) return stopped(error_);
  }
}

Transfer ByteStream::receive(std::span<iovec> pieces) {
  const OneThread::Turn turn(one_thread_);
  if (tls_) return tls_->receive(pieces);
  msghdr message = message_of(pieces);
  for (;;) {
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (got > 0) return {Transfer::Outcome::done, static_cast<std::size_t>(got)};
    if (got == 0) return {Transfer::Outcome::ended};
    error_ = errno;
    if (error_ != EINTR) return stopped(error_);
  }
}

bool ByteStream::finish() {
  const OneThread::Turn turn(one_thread_);
  if (tls_ && tls_->finish().outcome == Transfer::Outcome::blocked) return false;
  ::shutdown(socket_.get(), SHUT_WR);
  return true;
}

void ByteStream::close() {
  const OneThread::Turn turn(one_thread_);
  tls_.reset();
  socket_.reset();
}

}  // namespace poseidon
