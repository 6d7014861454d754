// A slow network between a worker and a server. It sends on at a fixed rate what it receives.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "cpp/rendezvous/ports.h"

namespace poseidon::testing {

/// Listens on `address()` and connects each connection to `target_port` on loopback.
class SlowRelay {
 public:
  SlowRelay(std::uint16_t target_port, std::size_t bytes_per_second)
      : target_port_(target_port), piece_bytes_(bytes_per_second / kTurnsPerSecond) {
    const int small = 32 << 10;  // a small buffer, so that the relay, and not the kernel, holds the waiting data
    ::setsockopt(listener_.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    EXPECT_TRUE(bind_reserved(listener_.get(), port_));
    ::listen(listener_.get(), 16);
    thread_ = std::thread([this] { run(); });
  }
  ~SlowRelay() {
    stopping_ = true;
    thread_.join();
  }
  SlowRelay(const SlowRelay&) = delete;
  SlowRelay& operator=(const SlowRelay&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  static constexpr std::size_t kTurnsPerSecond = 100;
  struct Pair {
    FileDescriptor ends[2];
    bool open = true;
  };

  void run() {
    while (!stopping_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1000 / kTurnsPerSecond));  // a rate, over real sockets
      FileDescriptor accepted(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (accepted) pairs_.push_back({{std::move(accepted), connected_socket(target_port_)}});
      for (Pair& pair : pairs_)
        for (int from = 0; from < 2; ++from) pass(pair, from);
    }
  }

  void pass(Pair& pair, int from) {
    if (!pair.open) return;
    std::vector<char> piece(piece_bytes_);
    const ssize_t got = ::recv(pair.ends[from].get(), piece.data(), piece.size(), MSG_DONTWAIT);
    if (got == 0) {
      pair.open = false;
      pair.ends[0].reset();
      pair.ends[1].reset();
    }
    for (ssize_t sent = 0; got > 0 && sent < got;) {
      const ssize_t count =
          ::send(pair.ends[1 - from].get(), piece.data() + sent, static_cast<std::size_t>(got - sent), MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += count;
    }
  }

  const std::uint16_t port_ = free_port();
  const std::uint16_t target_port_;
  const std::size_t piece_bytes_;
  const FileDescriptor listener_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  std::list<Pair> pairs_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace poseidon::testing
