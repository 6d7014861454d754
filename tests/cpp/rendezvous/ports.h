// Options for tests in which several ranks of one process find each other on loopback.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/thread.h"
#include "poseidon/options.h"
#include "poseidon/status.h"
#include "rendezvous/tcp_store.h"

namespace poseidon::testing {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Others may bind the socket's port, too, as long as nobody listens on it.
inline void reuse_address(int socket) {
  const int on = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

/// Binds the socket to a port of `free_port` on loopback. Returns whether it could.
inline bool bind_reserved(int socket, std::uint16_t port) {
  reuse_address(socket);
  const sockaddr_in address = loopback(port);
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

/// Returns a port that nobody listens on. It is outside the range that the kernel uses for outgoing connections, and
/// outside that of `poseidon.launch.free_port`. No other process that asks in this way gets it before this one has asked
/// for many more.
inline std::uint16_t free_port() {
  constexpr unsigned kFirst = 30'000;
  constexpr unsigned kCount = 2'768;
  constexpr std::size_t kReserved = 64;
  static std::mutex mutex;
  static std::deque<FileDescriptor> reserved;
  static unsigned next = static_cast<unsigned>(::getpid()) * (kCount / 4);  // tests run as four processes
  const std::lock_guard lock(mutex);
  for (;;) {
    const auto port = static_cast<std::uint16_t>(kFirst + next++ % kCount);
    FileDescriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = loopback(port);
    if (::bind(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    // While it stays bound, only who reuses addresses can bind the port.
    reuse_address(probe.get());
    reserved.push_back(std::move(probe));
    if (reserved.size() > kReserved) reserved.pop_front();
    return port;
  }
}

/// Returns a connection to a port of this machine.
inline FileDescriptor connected_socket(std::uint16_t port) {
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(port);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return FileDescriptor();
  return fd;
}

inline Options test_options(int rank, int world_size, std::uint16_t port) {
  Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.master_port = port;
  options.coding = CodingPolicy::on;  // every exchange goes through the coder
  options.timeout = std::chrono::seconds(20);
  return options;
}

inline bool always() { return true; }

inline constexpr OnFailure kRejoin = OnFailure::rejoin;
inline constexpr OnFailure kShrink = OnFailure::shrink;

inline bool contains(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

inline std::shared_ptr<Store> open_store(const Options& options) {
  auto store = open_tcp_store(options, always);
  EXPECT_TRUE(store.ok()) << store.status().message();
  return store.ok() ? store.value() : nullptr;
}

/// Runs `body(rank)` on one thread for each rank and joins the threads.
template <typename F>
void run_ranks(int world_size, F&& body) {
  std::vector<Thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.emplace_back("rank " + std::to_string(rank), [&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

}  // namespace poseidon::testing
