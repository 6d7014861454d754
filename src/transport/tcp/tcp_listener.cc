#include "transport/tcp/tcp_listener.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "transport/tcp/address.h"
#include "transport/tcp/congestion_control.h"
#include "transport/tcp/tcp_flow.h"

namespace poseidon::tcp {

Result<std::unique_ptr<Listener>> TcpListener::listen(Loop& loop, const std::string& address,
                                                      const Admission& admission, OnAccept on_accept) {
  auto candidates = resolve(address);
  if (!candidates.ok()) return candidates.status().with_context("cannot listen");
  int error = 0;
  for (const SocketAddress& candidate : candidates.value()) {
    FileDescriptor socket = bind_and_listen(candidate);
    if (!socket) {
      error = errno;
      continue;
    }
    avoid_bbr(socket.get());
    auto listener = std::make_unique<TcpListener>(loop, std::move(socket), admission, std::move(on_accept));
    if (Status status = listener->entrance_->start(); !status.ok())
      return status.with_context("cannot listen on " + address);
    return Result<std::unique_ptr<Listener>>(std::move(listener));
  }
  return Status(ErrorCode::unreachable,
                "cannot listen on " + address + ": " + errno_text(error) + "; choose another port or interface");
}

TcpListener::TcpListener(Loop& loop, FileDescriptor socket, const Admission& admission, OnAccept on_accept)
    : loop_(loop),
      address_(to_text(local_address(socket.get()))),
      on_accept_(std::move(on_accept)),
      silence_(admission.silence),
      coding_(admission.coding) {
  entrance_ = std::make_unique<Entrance>(
      loop, std::move(socket), wire::Purpose::flow, admission, [](int peer) { return source_of(peer_address(peer)); },
      [this](FileDescriptor peer, ConnectionHandshake& handshake) { enter(std::move(peer), handshake); });
}

TcpListener::~TcpListener() {
  loop_.check_other_thread();
  loop_.call([this] { entrance_.reset(); });
}

void TcpListener::enter(FileDescriptor socket, ConnectionHandshake& handshake) {
  const auto flow =
      std::make_shared<TcpFlow>(loop_, ByteStream(std::move(socket), handshake.take_tls()), silence_, coding_);
  flow->set_key_id(handshake.key_name());
  on_accept_(flow);
}

}  // namespace poseidon::tcp
