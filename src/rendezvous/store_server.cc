#include "rendezvous/store_server.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <utility>

#include "rendezvous/store_protocol.h"

namespace poseidon {

using namespace store_protocol;

namespace {

// The most that is read from one connection per wake-up.
constexpr std::size_t kReadBytes = std::size_t{64} << 10;

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::listen(const tcp::SocketAddress& address,
                                                         const Admission& admission) {
  FileDescriptor socket = tcp::bind_and_listen(address);
  if (!socket) return Status(ErrorCode::unreachable, errno_text(errno));
  auto server = std::make_unique<StoreServer>(std::move(socket), admission);
  if (Status status = server->entrance_->start(); !status.ok()) return status;
  return server;
}

StoreServer::StoreServer(FileDescriptor socket, const Admission& admission) {
  entrance_ = std::make_unique<Entrance>(
      loop_, std::move(socket), wire::Purpose::store, admission,
      [](int peer) { return tcp::source_of(tcp::peer_address(peer)); },
      [this](FileDescriptor peer, ConnectionHandshake& handshake) {
        enter(ByteStream(std::move(peer), handshake.take_tls()));
      });
  entrance_->on_other_secret([this](int peer) {
    const std::string address = tcp::to_text(tcp::peer_address(peer));
    values_.insert_or_assign(kOtherSecretKey, address.substr(0, address.rfind(':')));
  });
}

StoreServer::~StoreServer() {
  loop_.call([this] {
    entrance_.reset();
    for (const auto& [fd, connection] : connections_) loop_.unwatch(fd);
  });
}

void StoreServer::enter(ByteStream stream) {
  const int fd = stream.socket();
  if (connections_.size() >= kMostConnections) return;
  Connection connection;
  connection.stream = std::move(stream);
  if (!loop_.watch(fd, wanted_events(connection), [this, fd](std::uint32_t) { on_ready(fd); }).ok()) return;
  connections_.insert_or_assign(fd, std::move(connection));
}

/// A connection may have bytes to read for which there is no event. It is then woken because it can write.
std::uint32_t StoreServer::wanted_events(const Connection& connection) {
  if (connection.is_sending()) return EPOLLOUT;
  return connection.stream.has_unread() ? EPOLLIN | EPOLLOUT : EPOLLIN;
}

void StoreServer::on_ready(int fd) {
  Connection& connection = connections_.at(fd);
  if (!receive(connection) || !answer_all(connection) || !loop_.rewatch(fd, wanted_events(connection)).ok()) {
    loop_.unwatch(fd);
    connections_.erase(fd);
  }
}

/// Reads arrived bytes, up to a connection's share. Returns false if the connection has ended.
bool StoreServer::receive(Connection& connection) {
  if (connection.is_sending()) return true;
  std::array<char, kReadBytes> block;  // NOLINT(cppcoreguidelines-pro-type-member-init): 64 KiB for every few bytes
  std::array<iovec, 1> piece{{{block.data(), block.size()}}};
  const Transfer got = connection.stream.receive(piece);
  if (got.outcome == Transfer::Outcome::blocked) return true;
  if (got.outcome != Transfer::Outcome::done) return false;
  connection.in.append(block.data(), got.bytes);
  return true;
}

/// Sends the waiting bytes. Returns false if the connection has ended.
bool StoreServer::flush(Connection& connection) {
  while (connection.is_sending()) {
    std::array<iovec, 1> rest{
        {{connection.out.data() + connection.sent_bytes, connection.out.size() - connection.sent_bytes}}};
    const Transfer sent = connection.stream.send(rest);
    if (sent.outcome == Transfer::Outcome::blocked) return true;
    if (sent.outcome != Transfer::Outcome::done) return false;
    connection.sent_bytes += sent.bytes;
    if (connection.sent_bytes < connection.out.size()) continue;
    connection.out.clear();
    connection.sent_bytes = 0;
  }
  return true;
}

/// Answers the complete requests. Returns false if the connection has ended or has sent an invalid request.
bool StoreServer::answer_all(Connection& connection) {
  for (;;) {
    if (!flush(connection)) return false;
    if (connection.is_sending()) return true;
    const auto request = parse_request(connection.in);
    if (!request.ok()) return false;
    if (!request.value()) return true;
    const auto& [op, key, value] = *request.value();
    if (op == kSet)
      set(key, value, connection.out);
    else
      get(key, connection.out);
    connection.in.erase(0, request.value()->size_bytes());
  }
}

void StoreServer::set(std::string_view key, std::string_view value, std::string& out) {
  const auto found = values_.find(key);
  const bool is_new = found == values_.end();
  const std::size_t freed_bytes = is_new ? 0 : key.size() + found->second.size();
  const std::size_t after_bytes = stored_bytes_ - freed_bytes + key.size() + value.size();
  if (after_bytes > kMostStoredBytes || (is_new && values_.size() >= kMostKeys)) return append_u32(out, kFull);
  stored_bytes_ = after_bytes;
  values_.insert_or_assign(std::string(key), std::string(value));
  append_u32(out, 0);
}

void StoreServer::get(std::string_view key, std::string& out) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return append_u32(out, kNoSuchKey);
  append_u32(out, found->second.size());
  out += found->second;
}

}  // namespace poseidon
