#include "transport/connector.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

namespace poseidon {

namespace {

std::string seconds_text(Clock::duration duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", std::chrono::duration<double>(duration).count());
  return text.data();
}

}  // namespace

Connector::Connector(Loop& loop, std::string address, std::size_t candidate_count, Clock::time_point deadline,
                     OnConnect done)
    : loop_(loop), address_(std::move(address)), attempts_(candidate_count, deadline), done_(std::move(done)) {}

void Connector::limit_attempt(Clock::duration longest, const std::string& why) {
  loop_.cancel(timer_);
  timer_ = loop_.call_at(attempts_.limit(longest), [self = shared_from_this(), why] { self->failed(why); });
}

void Connector::failed(std::string why) {
  loop_.check_thread();
  const auto self = shared_from_this();
  end_attempt();
  if (const auto next = attempts_.next()) {
    timer_ = loop_.call_at(*next, [self] { self->attempt(); });
  } else {
    if (!handshake_failure_.empty() && why != handshake_failure_) why += "; before that: " + handshake_failure_;
    done_(Status(ErrorCode::unreachable,
                 "cannot connect to " + address_ + " within " + seconds_text(Clock::now() - started_) + ": " + why));
  }
}

void Connector::finish(Result<std::shared_ptr<Flow>> result) {
  const auto self = shared_from_this();
  end_attempt();
  done_(std::move(result));
}

void Connector::end_attempt() {
  drop_attempt();
  loop_.cancel(timer_);
}

SocketConnector::SocketConnector(Loop& loop, std::string address, std::size_t candidate_count, Admission admission,
                                 Clock::time_point deadline, OnConnect done)
    : Connector(loop, std::move(address), candidate_count, deadline, std::move(done)),
      admission_(std::move(admission)) {}

void SocketConnector::begin_handshake() {
  handshake_.emplace(wire::Handshake::Role::connector, wire::Purpose::flow, admission_);
  limit_attempt(admission_.patience, errno_text(ETIMEDOUT));
}

void SocketConnector::shake_hands() {
  const auto self = shared_from_this();
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
  auto flow = make_flow();
  if (!flow.ok()) return failed(flow.status().message());
  flow.value()->set_key_id(handshake_->key_name());
  finish(std::move(flow));
}

void SocketConnector::drop_attempt() {
  if (socket_) loop_.unwatch(socket_.get());
  socket_.reset();
  handshake_.reset();
}

}  // namespace poseidon
