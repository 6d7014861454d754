#include "transport/tcp/tcp_listener.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "transport/tcp/address.h"
#include "transport/tcp/tcp_flow.h"

namespace poseidon::tcp {

namespace {

constexpr int kAcceptsPerWakeup = 64;
constexpr std::chrono::milliseconds kPause{100};

/// Invalid, with errno set, on failure.
FileDescriptor bind_and_listen(const SocketAddress& address) {
  FileDescriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  const int on = 1;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      ::bind(socket.get(), address.get(), address.size_bytes) == 0 && ::listen(socket.get(), SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

}  // namespace

Result<std::unique_ptr<Listener>> TcpListener::listen(Loop& loop, const std::string& address, OnAccept on_accept) {
  auto candidates = resolve(address);
  if (!candidates.ok()) return candidates.status().with_context("cannot listen");
  int error = 0;
  for (const SocketAddress& candidate : candidates.value()) {
    FileDescriptor socket = bind_and_listen(candidate);
    if (!socket) {
      error = errno;
      continue;
    }
    auto listener = std::make_unique<TcpListener>(loop, std::move(socket), std::move(on_accept));
    Status status;
    loop.call([&] { status = listener->start(); });
    if (!status.ok()) return status.with_context("cannot listen on " + address);
    return Result<std::unique_ptr<Listener>>(std::move(listener));
  }
  return Status(ErrorCode::unreachable, "cannot listen on " + address + ": " + errno_text(error));
}

TcpListener::TcpListener(Loop& loop, FileDescriptor socket, OnAccept on_accept)
    : loop_(loop),
      socket_(std::move(socket)),
      address_(to_text(local_address(socket_.get()))),
      on_accept_(std::move(on_accept)) {}

TcpListener::~TcpListener() {
  loop_.call([this] {
    loop_.cancel(resume_timer_);
    loop_.unwatch(socket_.get());
  });
}

Status TcpListener::start() {
  return loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
}

void TcpListener::accept_all() {
  for (int i = 0; i < kAcceptsPerWakeup; ++i) {
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      on_accept_(std::make_shared<TcpFlow>(loop_, std::move(socket)));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) return pause();
    // Anything else is about the one connection that went before it was accepted.
  }
}

/// The connection that cannot be taken stays in the backlog: without a pause the loop would spin.
void TcpListener::pause() {
  if (!loop_.rewatch(socket_.get(), 0).ok()) return;
  resume_timer_ = loop_.call_at(Clock::now() + kPause, [this] {
    // Modifying a registration that exists cannot run out of anything.
    static_cast<void>(loop_.rewatch(socket_.get(), EPOLLIN));
  });
}

}  // namespace poseidon::tcp
