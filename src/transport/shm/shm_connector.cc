#include "transport/shm/shm_connector.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/shm/shm_flow.h"

namespace poseidon::shm {

namespace {

Status system_error() { return {ErrorCode::unreachable, errno_text(errno)}; }

}  // namespace

ShmConnector::ShmConnector(Loop& loop, std::string address, const SocketName& name, Clock::time_point deadline,
                           Done done)
    : loop_(loop), address_(std::move(address)), name_(name), deadline_(deadline), done_(std::move(done)) {}

void ShmConnector::attempt() {
  auto flow = try_once();
  if (flow.ok()) return done_(std::move(flow));
  const auto now = Clock::now();
  if (now >= deadline_) {
    return done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + ": " + flow.status().message()));
  }
  loop_.call_at(std::min(deadline_, now + backoff_.next()), [self = shared_from_this()] { self->attempt(); });
}

Result<std::shared_ptr<Flow>> ShmConnector::try_once() {
  FileDescriptor socket = make_socket();
  if (!socket || ::connect(socket.get(), name_.get(), name_.size_bytes) != 0) return system_error();
  if (const auto peer = peer_process(socket.get()); !peer.ok()) return peer.status();
  auto files = Segment::make_files();
  if (!files.ok()) return files.status();
  if (!send_files(socket.get(), files.value())) return system_error();
  auto segment = Segment::open(std::move(files.value()), true);
  if (!segment.ok()) return segment.status();
  return std::shared_ptr<Flow>(
      std::make_shared<ShmFlow>(loop_, std::move(socket), std::move(segment.value()), address_));
}

}  // namespace poseidon::shm
