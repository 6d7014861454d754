#include "transport/tcp/tcp_connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "transport/tcp/congestion_control.h"
#include "transport/tcp/tcp_flow.h"

namespace poseidon::tcp {

namespace {

// A packet to a host that is not up yet is lost, and the kernel sends the next one after 1, 3 and 7 s. A new attempt
// finds the host sooner, and the next candidate gets its turn.
constexpr std::chrono::seconds kAttemptTime{3};

std::string seconds_text(Clock::duration duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", std::chrono::duration<double>(duration).count());
  return text.data();
}

}  // namespace

TcpConnector::TcpConnector(Loop& loop, std::string address, std::vector<SocketAddress> candidates, Admission admission,
                           Clock::time_point deadline, OnConnect done)
    : loop_(loop),
      address_(std::move(address)),
      candidates_(std::move(candidates)),
      admission_(std::move(admission)),
      started_(Clock::now()),
      done_(std::move(done)),
      attempts_(candidates_.size(), deadline) {}

void TcpConnector::start() {
  loop_.check_thread();
  try_candidate();
}

void TcpConnector::try_candidate() {
  const SocketAddress& candidate = candidates_[attempts_.candidate()];
  socket_ = FileDescriptor(::socket(candidate.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) return failed(errno_text(errno));
  avoid_bbr(socket_.get());
  if (::connect(socket_.get(), candidate.get(), candidate.size_bytes) != 0 && errno != EINPROGRESS) {
    return failed(errno_text(errno));
  }
  const auto self = shared_from_this();
  if (Status status = loop_.watch(socket_.get(), EPOLLOUT, [self](std::uint32_t) { self->on_ready(); }); !status.ok()) {
    return failed(errno_text(ENOMEM));
  }
  timer_ = loop_.call_at(attempts_.limit(kAttemptTime), [self] { self->failed(errno_text(ETIMEDOUT)); });
}

/// The connection has succeeded or failed, or more of the handshake has come.
void TcpConnector::on_ready() {
  const auto self = shared_from_this();
  if (!handshake_) {
    int error = connect_error(socket_.get());
    if (error == 0 && !loop_.rewatch(socket_.get(), EPOLLIN).ok()) error = ENOMEM;
    if (error != 0) return failed(errno_text(error));
    handshake_.emplace(wire::Handshake::Role::connector, wire::Purpose::flow, admission_);
    loop_.cancel(timer_);
    timer_ = loop_.call_at(attempts_.limit(admission_.patience), [self] { self->failed(errno_text(ETIMEDOUT)); });
  }
  shake_hands();
}

void TcpConnector::shake_hands() {
  switch (handshake_->advance(socket_.get())) {
    case HandshakeStep::waiting:
      return;
    case HandshakeStep::ended:  // the peer is ending or has too many pending connections; a later attempt may succeed
      return failed(errno_text(ECONNRESET));
    case HandshakeStep::failed:
      handshake_failure_ = handshake_->failure();
      return failed(handshake_failure_);
    case HandshakeStep::over:
      break;
  }
  if (handshake_->state() != wire::Handshake::State::done)
    return finish(wire::handshake_error(handshake_->state(), address_));
  loop_.unwatch(socket_.get());
  const auto flow = std::make_shared<TcpFlow>(loop_, ByteStream(std::move(socket_), handshake_->take_tls()),
                                              admission_.silence, admission_.coding);
  flow->set_key_id(handshake_->key_name());
  finish(std::shared_ptr<Flow>(flow));
}

void TcpConnector::finish(Result<std::shared_ptr<Flow>> result) {
  stop_attempt();
  done_(std::move(result));
}

void TcpConnector::stop_attempt() {
  if (socket_) loop_.unwatch(socket_.get());
  socket_.reset();
  handshake_.reset();
  loop_.cancel(timer_);
}

void TcpConnector::failed(std::string why) {
  const auto self = shared_from_this();
  stop_attempt();
  if (const auto next = attempts_.next()) {
    timer_ = loop_.call_at(*next, [self] { self->try_candidate(); });
  } else {
    if (!handshake_failure_.empty() && why != handshake_failure_) why += "; before that: " + handshake_failure_;
    done_(Status(ErrorCode::unreachable,
                 "cannot connect to " + address_ + " within " + seconds_text(Clock::now() - started_) + ": " + why));
  }
}

}  // namespace poseidon::tcp
