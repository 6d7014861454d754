#include "transport/shm/shm_connector.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "transport/shm/shm_flow.h"

namespace poseidon::shm {

namespace {

Status system_error(int error) { return {ErrorCode::unreachable, errno_text(error)}; }

}  // namespace

ShmConnector::ShmConnector(Loop& loop, std::string address, const SocketName& name, Admission admission,
                           Clock::time_point deadline, OnConnect done)
    : loop_(loop),
      address_(std::move(address)),
      name_(name),
      admission_(std::move(admission)),
      done_(std::move(done)),
      attempts_(1, deadline) {}

void ShmConnector::attempt() {
  loop_.check_thread();
  if (Status status = begin(); !status.ok()) return failed(status);
  timer_ = loop_.call_at(attempts_.limit(admission_.patience),
                         [self = shared_from_this()] { self->failed(system_error(ETIMEDOUT)); });
  shake_hands();
}

Status ShmConnector::begin() {
  socket_ = make_socket();
  if (!socket_ || ::connect(socket_.get(), name_.get(), name_.size_bytes) != 0) return system_error(errno);
  if (const auto peer = peer_process(socket_.get()); !peer.ok()) return peer.status();
  handshake_.emplace(wire::Handshake::Role::connector, wire::Purpose::flow, admission_.credentials,
                     wire::random_nonce());
  return loop_.watch(socket_.get(), EPOLLIN, [self = shared_from_this()](std::uint32_t) { self->shake_hands(); });
}

void ShmConnector::shake_hands() {
  const auto self = shared_from_this();
  switch (advance(*handshake_, socket_.get())) {
    case HandshakeStep::waiting:
      return;
    case HandshakeStep::ended:
      return failed(system_error(ECONNRESET));
    case HandshakeStep::failed:
      return failed(system_error(errno));
    case HandshakeStep::over:
      break;
  }
  if (handshake_->state() != wire::Handshake::State::done)
    return finish(wire::handshake_error(handshake_->state(), address_));
  auto flow = share_memory();
  if (!flow.ok()) return failed(flow.status());
  finish(std::move(flow));
}

/// Gives the socket to the flow.
Result<std::shared_ptr<Flow>> ShmConnector::share_memory() {
  auto files = Segment::make_files();
  if (!files.ok()) return files.status();
  if (!send_files(socket_.get(), files.value())) return system_error(errno);
  auto segment = Segment::open(std::move(files.value()), true);
  if (!segment.ok()) return segment.status();
  loop_.unwatch(socket_.get());
  const auto flow = std::make_shared<ShmFlow>(loop_, std::move(socket_), std::move(segment.value()), address_);
  flow->set_key_id(handshake_->key_name());
  return std::shared_ptr<Flow>(flow);
}

void ShmConnector::finish(Result<std::shared_ptr<Flow>> result) {
  stop_attempt();
  done_(std::move(result));
}

void ShmConnector::stop_attempt() {
  if (socket_) loop_.unwatch(socket_.get());
  socket_.reset();
  handshake_.reset();
  loop_.cancel(timer_);
}

void ShmConnector::failed(const Status& why) {
  const auto self = shared_from_this();
  stop_attempt();
  const auto next = attempts_.next();
  if (!next) return done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + ": " + why.message()));
  timer_ = loop_.call_at(*next, [self] { self->attempt(); });
}

}  // namespace poseidon::shm
