// Relay: a man in the middle of TCP connections. It records what passes and may change it.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "transport/tcp/address.h"

namespace poseidon::testing {

/// Listens on a port of its own and passes on what arrives, byte by byte or in pieces, until it is destroyed.
class Relay {
 public:
  using Bytes = std::vector<std::byte>;
  enum class Way { there, back };  // from the connector, and to the connector
  /// May change what passes, and may say that both connections are to be cut before it. `passed_bytes` passed in this
  /// direction of this connection before. It is called on the relay's thread.
  enum class Verdict { pass, cut };
  using Meddle = std::function<Verdict(Way way, std::size_t passed_bytes, Bytes& bytes)>;

  explicit Relay(const std::string& target, Meddle meddle = {})
      : target_(tcp::resolve(target).value().front()),
        meddle_(std::move(meddle)),
        listener_(tcp::bind_and_listen(tcp::resolve("127.0.0.1:0").value().front())),
        address_(tcp::to_text(tcp::local_address(listener_.get()))),
        thread_([this] { run(); }) {}
  ~Relay() {
    ended_ = true;
    thread_.join();
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  const std::string& address() const { return address_; }

  /// Returns everything that has passed so far in one direction, of all connections.
  Bytes recorded(Way way) {
    const std::lock_guard lock(mutex_);
    return recorded_[static_cast<std::size_t>(way)];
  }

 private:
  struct Connection {
    std::array<FileDescriptor, 2> ends;  // the connector's end and the target's end
    std::array<std::size_t, 2> passed_bytes{};
  };

  void run() {
    while (!ended_) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const auto& one : connections_)
        for (const auto& end : one->ends) entries.push_back({end.get(), POLLIN, 0});
      if (::poll(entries.data(), entries.size(), 20) <= 0) continue;
      for (std::size_t i = 0; i < connections_.size(); ++i) {
        bool goes_on = true;
        for (const Way way : {Way::there, Way::back})
          if (entries[1 + 2 * i + static_cast<std::size_t>(way)].revents != 0)
            goes_on = goes_on && pass(*connections_[i], way);
        if (!goes_on) connections_[i].reset();
      }
      std::erase(connections_, nullptr);
      if (entries[0].revents != 0) accept();
    }
  }

  void accept() {
    auto connection = std::make_unique<Connection>();
    connection->ends[0] = FileDescriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    connection->ends[1] = FileDescriptor(::socket(target_.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!connection->ends[0] || ::connect(connection->ends[1].get(), target_.get(), target_.size_bytes) != 0) return;
    connections_.push_back(std::move(connection));
  }

  /// Returns false when the connection is over.
  bool pass(Connection& connection, Way way) {
    const auto from = static_cast<std::size_t>(way);
    Bytes bytes(64u << 10);
    const ssize_t got = ::recv(connection.ends[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return false;
    bytes.resize(static_cast<std::size_t>(got));
    {
      const std::lock_guard lock(mutex_);
      recorded_[from].insert(recorded_[from].end(), bytes.begin(), bytes.end());
    }
    if (meddle_ && meddle_(way, connection.passed_bytes[from], bytes) == Verdict::cut) return false;
    connection.passed_bytes[from] += static_cast<std::size_t>(got);
    return ::send(connection.ends[1 - from].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }

  const tcp::SocketAddress target_;
  const Meddle meddle_;
  const FileDescriptor listener_;
  const std::string address_;
  std::vector<std::unique_ptr<Connection>> connections_;  // only the relay's thread uses it
  std::mutex mutex_;
  std::array<Bytes, 2> recorded_;  // guarded by mutex_
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace poseidon::testing
