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
    : SocketConnector(loop, std::move(address), 1, std::move(admission), deadline, std::move(done)), name_(name) {}

void ShmConnector::attempt() {
  loop_.check_thread();
  if (Status status = begin(); !status.ok()) return failed(status.message());
  begin_handshake();
  shake_hands();
}

Status ShmConnector::begin() {
  socket_ = make_socket();
  if (!socket_ || ::connect(socket_.get(), name_.get(), name_.size_bytes) != 0) return system_error(errno);
  if (const auto peer = peer_process(socket_.get()); !peer.ok()) return peer.status();
  return loop_.watch(socket_.get(), EPOLLIN, [self = shared_from_this(), this](std::uint32_t) { shake_hands(); });
}

Result<std::shared_ptr<Flow>> ShmConnector::make_flow() {
  auto files = Segment::make_files();
  if (!files.ok()) return files.status();
  if (!send_files(socket_.get(), files.value())) return system_error(errno);
  auto segment = Segment::open(std::move(files.value()), true);
  if (!segment.ok()) return segment.status();
  loop_.unwatch(socket_.get());
  return std::shared_ptr<Flow>(
      std::make_shared<ShmFlow>(loop_, std::move(socket_), std::move(segment.value()), address_));
}

}  // namespace poseidon::shm
