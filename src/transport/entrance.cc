#include "transport/entrance.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace poseidon {

namespace {

// How many connections are accepted per wake-up, so that the loop's flows get their turns in between.
constexpr int kAcceptsPerWakeup = 16;
constexpr std::chrono::milliseconds kPause{100};

/// Closes with a reset if the medium has one. The peer may then try again, and the kernel keeps nothing of the
/// connection.
void close_abruptly(FileDescriptor& socket) {
  const linger at_once{1, 0};
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once));
  socket.reset();
}

}  // namespace

Entrance::Entrance(Loop& loop, FileDescriptor socket, wire::Purpose purpose, Admission admission, SourceOf source_of,
                   OnEnter on_enter)
    : loop_(loop),
      socket_(std::move(socket)),
      purpose_(purpose),
      admission_(std::move(admission)),
      source_of_(std::move(source_of)),
      on_enter_(std::move(on_enter)) {}

Entrance::~Entrance() {
  loop_.check_thread();
  loop_.cancel(resume_timer_);
  loop_.cancel(patience_timer_);
  loop_.unwatch(socket_.get());
  while (!pending_.empty()) close_pending(pending_.begin());
}

Status Entrance::start() {
  return loop_.call([this] { return loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { accept_some(); }); });
}

void Entrance::accept_some() {
  for (int i = 0; i < kAcceptsPerWakeup; ++i) {
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      admit(std::move(socket));
      continue;
    }
    if (would_block(errno)) return;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      if (pending_.empty()) return pause();
      close_pending(pending_.begin());
    }
    // Any other error concerns only a connection that ended before it was accepted.
  }
}

/// A connection that cannot be accepted stays in the backlog. Without a pause the loop would spin.
void Entrance::pause() {
  if (!loop_.rewatch(socket_.get(), 0).ok()) return;
  resume_timer_ = loop_.call_at(Clock::now() + kPause, [this] {
    // Changing an existing registration takes no resource that could run out.
    static_cast<void>(loop_.rewatch(socket_.get(), EPOLLIN));
  });
}

void Entrance::admit(FileDescriptor socket) {
  auto source = source_of_(socket.get());
  if (!source) return;
  if (const auto old = pending_to_close(pending_, *source, admission_.pending_limits); old != pending_.end())
    close_pending(old);
  const auto deadline = Clock::now() + admission_.patience;
  pending_.push_back({std::move(socket), std::move(*source), deadline,
                      ConnectionHandshake(wire::Handshake::Role::acceptor, purpose_, admission_)});
  const Place place = std::prev(pending_.end());
  if (!loop_.watch(place->socket.get(), EPOLLIN, [this, place](std::uint32_t) { advance_one(place); }).ok())
    return close_pending(place);
  if (patience_timer_ == 0) patience_timer_ = loop_.call_at(deadline, [this] { close_late(); });
  advance_one(place);  // its first message has often come with it
}

void Entrance::advance_one(Place place) {
  const HandshakeStep step = place->handshake.advance(place->socket.get());
  if (step == HandshakeStep::waiting) return;
  if (step != HandshakeStep::over || place->handshake.state() != wire::Handshake::State::done) {
    if (on_other_secret_ && place->handshake.names_other_secret()) on_other_secret_(place->socket.get());
    return close_pending(place);
  }
  FileDescriptor socket = std::move(place->socket);
  ConnectionHandshake handshake = std::move(place->handshake);
  loop_.unwatch(socket.get());
  pending_.erase(place);
  on_enter_(std::move(socket), handshake);
}

void Entrance::close_pending(Place place) {
  loop_.unwatch(place->socket.get());
  close_abruptly(place->socket);
  pending_.erase(place);
}

void Entrance::close_late() {
  const auto now = Clock::now();
  while (!pending_.empty() && pending_.front().deadline <= now) close_pending(pending_.begin());
  patience_timer_ = 0;
  if (!pending_.empty()) patience_timer_ = loop_.call_at(pending_.front().deadline, [this] { close_late(); });
}

}  // namespace poseidon
