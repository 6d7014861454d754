#include "transport/shm/shm_listener.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "base/invariant.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/shm_flow.h"

namespace poseidon::shm {

namespace {

// How long a listener waits for a peer's files. A peer sends them right after the handshake.
constexpr std::chrono::seconds kPatience{10};

/// Counts each process as a separate source, because all of them belong to this user.
std::optional<std::string> process_of(int socket) {
  const auto process = peer_process(socket);
  return process.ok() ? std::optional(std::to_string(process.value())) : std::nullopt;
}

}  // namespace

Result<std::unique_ptr<Listener>> ShmListener::listen(Loop& loop, const std::string& address,
                                                      const Admission& admission, OnAccept on_accept) {
  const std::string chosen = address.ends_with(":0") ? free_name() : address;
  const auto name = socket_name(chosen);
  if (!name.ok()) return name.status().with_context("cannot listen");
  FileDescriptor socket = make_socket();
  if (!socket || ::bind(socket.get(), name.value().get(), name.value().size_bytes) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return Status(ErrorCode::unreachable, "cannot listen on " + chosen + ": " + errno_text(errno));
  }
  auto listener = std::make_unique<ShmListener>(loop, std::move(socket), chosen, admission, std::move(on_accept));
  if (Status status = listener->entrance_->start(); !status.ok())
    return status.with_context("cannot listen on " + chosen);
  return Result<std::unique_ptr<Listener>>(std::move(listener));
}

ShmListener::ShmListener(Loop& loop, FileDescriptor socket, std::string address, const Admission& admission,
                         OnAccept on_accept)
    : loop_(loop), address_(std::move(address)), on_accept_(std::move(on_accept)) {
  entrance_ = std::make_unique<Entrance>(loop, std::move(socket), wire::Purpose::flow, admission, process_of,
                                         [this](FileDescriptor peer, const ConnectionHandshake& handshake) {
                                           await_files(std::move(peer), handshake.key_name());
                                         });
}

ShmListener::~ShmListener() {
  loop_.check_other_thread();
  loop_.call([this] {
    entrance_.reset();
    while (!pending_.empty()) dismiss(pending_.begin()->first);
  });
}

void ShmListener::await_files(FileDescriptor socket, const std::string& key_id) {
  const int fd = socket.get();
  if (!loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { on_files(fd); }).ok()) return;
  PendingConnection& connection = pending_[fd];
  connection.socket = std::move(socket);
  connection.key_id = key_id;
  connection.timer = loop_.call_at(Clock::now() + kPatience, [this, fd] { dismiss(fd); });
}

void ShmListener::on_files(int socket) {
  PendingConnection connection = dismiss(socket);
  auto files = receive_files(socket);
  if (!files.ok()) return;
  auto segment = Segment::open(std::move(files.value()), false);
  if (!segment.ok()) return;
  const std::string name = "process " + process_of(socket).value_or("unknown") + " on " + address_;
  const auto flow = std::make_shared<ShmFlow>(loop_, std::move(connection.socket), std::move(segment.value()), name);
  flow->set_key_id(connection.key_id);
  on_accept_(flow);
}

/// Stops waiting for a connection's files.
ShmListener::PendingConnection ShmListener::dismiss(int socket) {
  loop_.unwatch(socket);
  auto pending = pending_.extract(socket);
  invariant(!pending.empty(), "a connection is dismissed once");
  PendingConnection connection = std::move(pending.mapped());
  loop_.cancel(connection.timer);
  return connection;
}

}  // namespace poseidon::shm
