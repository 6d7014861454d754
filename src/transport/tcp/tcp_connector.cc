#include "transport/tcp/tcp_connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "transport/tcp/congestion_control.h"
#include "transport/tcp/tcp_flow.h"

namespace poseidon::tcp {

namespace {

// A packet to a host that is not up yet is lost, and the kernel sends the next one after 1, 3 and 7 s. A new attempt
// finds the host sooner, and the next candidate gets its turn.
constexpr std::chrono::seconds kAttemptTime{3};

}  // namespace

TcpConnector::TcpConnector(Loop& loop, std::string address, std::vector<SocketAddress> candidates, Admission admission,
                           Clock::time_point deadline, OnConnect done)
    : SocketConnector(loop, std::move(address), candidates.size(), std::move(admission), deadline, std::move(done)),
      candidates_(std::move(candidates)) {}

void TcpConnector::attempt() {
  loop_.check_thread();
  const SocketAddress& candidate = candidates_[attempts_.candidate()];
  socket_ = FileDescriptor(::socket(candidate.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) return failed(errno_text(errno));
  avoid_bbr(socket_.get());
  if (::connect(socket_.get(), candidate.get(), candidate.size_bytes) != 0 && errno != EINPROGRESS) {
    return failed(errno_text(errno));
  }
  const auto ready = [self = shared_from_this(), this](std::uint32_t) { on_ready(); };
  if (!loop_.watch(socket_.get(), EPOLLOUT, ready).ok()) return failed(errno_text(ENOMEM));
  limit_attempt(kAttemptTime, errno_text(ETIMEDOUT));
}

/// The connection has succeeded or failed, or more of the handshake has come.
void TcpConnector::on_ready() {
  if (!handshake_) {
    int error = connect_error(socket_.get());
    if (error == 0 && !loop_.rewatch(socket_.get(), EPOLLIN).ok()) error = ENOMEM;
    if (error != 0) return failed(errno_text(error));
    begin_handshake();
  }
  shake_hands();
}

Result<std::shared_ptr<Flow>> TcpConnector::make_flow() {
  loop_.unwatch(socket_.get());
  return std::shared_ptr<Flow>(std::make_shared<TcpFlow>(loop_, ByteStream(std::move(socket_), handshake_->take_tls()),
                                                         admission_.silence, admission_.coding));
}

}  // namespace poseidon::tcp
