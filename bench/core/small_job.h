// What the benchmarks of large jobs share: a worker that takes one step, and what it costs its process.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "poseidon/client.h"

namespace poseidon::bench {

inline bool always() { return true; }

[[noreturn]] inline void give_up(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

/// Adds layers of ones and exchanges them once. Ends the process if the sum is wrong.
inline void take_first_step(Client& client, std::size_t layer_count, std::size_t element_count) {
  std::vector<Layer> layers(layer_count);
  for (std::size_t i = 0; i < layer_count; ++i) {
    layers[i].name = "layer " + std::to_string(i);
    layers[i].element_count = element_count;
    layers[i].scheme = Scheme::ps;
  }
  const auto added = client.add_layers(layers, false, always);
  if (!added.ok()) give_up(added.status());
  std::vector<std::vector<float>> gradients(layer_count, std::vector<float>(element_count, 1.0F));
  for (std::size_t i = 0; i < layer_count; ++i) {
    const auto layer = added.value().first_layer + static_cast<std::uint32_t>(i);
    const Status status = client.start(layer, std::as_writable_bytes(std::span(gradients[i])), 1);
    if (!status.ok()) give_up(status);
  }
  if (const Status status = client.wait_all(always); !status.ok()) give_up(status);
  const std::vector<float> sum(element_count, static_cast<float>(client.world_size()));
  for (const auto& gradient : gradients)
    if (gradient != sum) give_up({ErrorCode::mismatch, "the sum of the first step is wrong"});
}

/// The sockets of this process, and the memory that the kernel holds for them.
struct OpenSockets {
  std::size_t count = 0;
  double kernel_mb = 0;
};

inline OpenSockets open_sockets() {
  OpenSockets sockets;
  std::error_code gone;  // a descriptor may be closed meanwhile
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    if (!std::filesystem::read_symlink(entry.path(), gone).string().starts_with("socket:")) continue;
    ++sockets.count;
    // Linux's SK_MEMINFO_…: received, limit, sent, limit, kept ahead, queued, options, backlog, dropped.
    std::uint32_t info[9] = {};
    socklen_t size = sizeof info;
    const int fd = std::atoi(entry.path().filename().c_str());
    if (::getsockopt(fd, SOL_SOCKET, SO_MEMINFO, info, &size) == 0)
      sockets.kernel_mb += static_cast<double>(info[0] + info[4] + info[5] + info[6] + info[7]) / 1e6;
  }
  return sockets;
}

inline double resident_mb() {
  std::ifstream pages("/proc/self/statm");
  double total = 0;
  double resident = 0;
  pages >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1e6;
}

}  // namespace poseidon::bench
