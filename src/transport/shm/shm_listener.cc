#include "transport/shm/shm_listener.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "transport/shm/local_socket.h"
#include "transport/shm/shm_flow.h"

namespace poseidon::shm {

namespace {

constexpr int kAcceptsPerWakeup = 64;
constexpr std::chrono::milliseconds kPause{100};
// A peer sends its files right after connecting.
constexpr std::chrono::seconds kPatience{10};

}  // namespace

Result<std::unique_ptr<Listener>> ShmListener::listen(Loop& loop, const std::string& address, OnAccept on_accept) {
  const std::string chosen = address.ends_with(":0") ? free_name() : address;
  const auto name = socket_name(chosen);
  if (!name.ok()) return name.status().with_context("cannot listen");
  FileDescriptor socket = make_socket();
  if (!socket || ::bind(socket.get(), name.value().get(), name.value().size_bytes) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return Status(ErrorCode::unreachable, "cannot listen on " + chosen + ": " + errno_text(errno));
  }
  auto listener = std::make_unique<ShmListener>(loop, std::move(socket), chosen, std::move(on_accept));
  Status status;
  loop.call([&] { status = listener->start(); });
  if (!status.ok()) return status.with_context("cannot listen on " + chosen);
  return Result<std::unique_ptr<Listener>>(std::move(listener));
}

ShmListener::ShmListener(Loop& loop, FileDescriptor socket, std::string address, OnAccept on_accept)
    : loop_(loop), socket_(std::move(socket)), address_(std::move(address)), on_accept_(std::move(on_accept)) {}

ShmListener::~ShmListener() {
  loop_.call([this] {
    loop_.cancel(resume_timer_);
    loop_.unwatch(socket_.get());
    while (!guests_.empty()) dismiss(guests_.begin()->first);
  });
}

Status ShmListener::start() {
  return loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
}

void ShmListener::accept_all() {
  for (int i = 0; i < kAcceptsPerWakeup; ++i) {
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      await_files(std::move(socket));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) return pause();
    // Anything else is about the one connection that went before it was accepted.
  }
}

/// The connection that cannot be taken stays in the backlog: without a pause the loop would spin.
void ShmListener::pause() {
  if (!loop_.rewatch(socket_.get(), 0).ok()) return;
  resume_timer_ = loop_.call_at(Clock::now() + kPause, [this] {
    // Modifying a registration that exists cannot run out of anything.
    static_cast<void>(loop_.rewatch(socket_.get(), EPOLLIN));
  });
}

void ShmListener::await_files(FileDescriptor socket) {
  const auto process = peer_process(socket.get());
  if (!process.ok()) return;  // a stranger: closed without a word
  const int fd = socket.get();
  if (!loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { on_files(fd); }).ok()) return;
  Guest& guest = guests_[fd];
  guest.socket = std::move(socket);
  guest.name = "process " + std::to_string(process.value()) + " on " + address_;
  guest.timer = loop_.call_at(Clock::now() + kPatience, [this, fd] { dismiss(fd); });
}

void ShmListener::on_files(int socket) {
  Guest guest = dismiss(socket);
  auto files = receive_files(socket);
  if (!files.ok()) return;
  auto segment = Segment::open(std::move(files.value()), false);
  if (!segment.ok()) return;
  on_accept_(std::make_shared<ShmFlow>(loop_, std::move(guest.socket), std::move(segment.value()), guest.name));
}

/// Waits no longer for its files.
ShmListener::Guest ShmListener::dismiss(int socket) {
  loop_.unwatch(socket);
  Guest guest = std::move(guests_.extract(socket).mapped());
  loop_.cancel(guest.timer);
  return guest;
}

}  // namespace poseidon::shm
