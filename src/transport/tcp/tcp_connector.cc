#include "transport/tcp/tcp_connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "transport/tcp/tcp_flow.h"

namespace poseidon::tcp {

namespace {

// A packet to a host that is not up yet is lost, and the kernel sends the next one after 1, 3, 7 s:
// a fresh attempt finds the host sooner, and the next candidate gets its turn.
constexpr std::chrono::seconds kAttemptTime{3};

/// A connection to a free port of this machine may meet itself (TCP's simultaneous open).
bool connected_to_itself(int fd) {
  const SocketAddress ours = local_address(fd);
  const SocketAddress theirs = peer_address(fd);
  return ours.size_bytes == theirs.size_bytes && std::memcmp(&ours.storage, &theirs.storage, ours.size_bytes) == 0;
}

std::string seconds_text(Clock::duration duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", std::chrono::duration<double>(duration).count());
  return text.data();
}

}  // namespace

TcpConnector::TcpConnector(Loop& loop, std::string address, std::vector<SocketAddress> candidates,
                           Clock::time_point deadline, Done done)
    : loop_(loop),
      address_(std::move(address)),
      candidates_(std::move(candidates)),
      started_(Clock::now()),
      deadline_(deadline),
      done_(std::move(done)) {}

void TcpConnector::start() { try_candidate(); }

void TcpConnector::try_candidate() {
  const SocketAddress& candidate = candidates_[next_candidate_];
  socket_ = FileDescriptor(::socket(candidate.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) return failed(errno);
  if (::connect(socket_.get(), candidate.get(), candidate.size_bytes) != 0 && errno != EINPROGRESS) {
    return failed(errno);
  }
  const auto self = shared_from_this();
  if (Status status = loop_.watch(socket_.get(), EPOLLOUT, [self](std::uint32_t) { self->on_writable(); });
      !status.ok()) {
    return failed(ENOMEM);
  }
  timer_ = loop_.call_at(std::min(deadline_, Clock::now() + kAttemptTime), [self] { self->failed(ETIMEDOUT); });
}

void TcpConnector::on_writable() {
  const auto self = shared_from_this();
  int error = 0;
  socklen_t size_bytes = sizeof(error);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size_bytes) != 0) error = errno;
  if (error == 0 && connected_to_itself(socket_.get())) error = ECONNREFUSED;
  if (error != 0) return failed(error);
  FileDescriptor socket = std::move(socket_);
  loop_.unwatch(socket.get());
  loop_.cancel(timer_);
  done_(std::shared_ptr<Flow>(std::make_shared<TcpFlow>(loop_, std::move(socket))));
}

void TcpConnector::failed(int error) {
  const auto self = shared_from_this();
  last_error_ = error;
  if (socket_) loop_.unwatch(socket_.get());
  socket_.reset();
  loop_.cancel(timer_);
  next_candidate_ = (next_candidate_ + 1) % candidates_.size();
  const auto now = Clock::now();
  if (now >= deadline_) return give_up();
  // A candidate's turn comes at once; a round of all of them only after a pause.
  const auto pause = next_candidate_ == 0 ? backoff_.next() : std::chrono::milliseconds(0);
  timer_ = loop_.call_at(std::min(deadline_, now + pause), [self] { self->try_candidate(); });
}

void TcpConnector::give_up() {
  done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + " within " +
                                           seconds_text(Clock::now() - started_) + ": " + errno_text(last_error_)));
}

}  // namespace poseidon::tcp
