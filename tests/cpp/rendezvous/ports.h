// Options for tests in which several ranks of one process find each other on loopback.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/thread.h"
#include "conformance/free_port.h"
#include "poseidon/options.h"
#include "poseidon/status.h"
#include "rendezvous/tcp_store.h"

namespace poseidon::testing {

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
