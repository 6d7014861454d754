// Every setting of the core, by the one name it has in C++, Python, the CLI and the environment.
//
// The core reads no environment variables: python/poseidon/options.py resolves keyword, command
// line, environment, configuration file and default, in that order, and passes the result here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace poseidon {

/// When a layer's synchronization may start (Poseidon §3.1).
enum class Schedule : std::uint8_t {
  wait_free,   // when the layer's gradient exists (WFBP)
  sequential,  // when the whole backward pass is done: the baseline
};

/// How tensors are cut and spread over the server shards.
enum class Partition : std::uint8_t {
  balanced,  // chunks, largest first, to the least loaded shard (Poseidon §4.1)
  coarse,    // a whole tensor per shard, round robin, as TensorFlow did: the baseline
};

struct Options {
  int rank = 0;
  int world_size = 1;
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 29500;
  std::string job = "default";  // ranks of different jobs never talk to each other

  std::string interface;             // address or device to listen on; empty: the one that leads to master_addr
  std::vector<std::string> servers;  // "host:port" of dedicated servers; empty: every worker hosts a shard

  std::size_t chunk_bytes = 2u << 20;    // largest piece of a tensor that one shard holds (Poseidon §4.1: 2 MB)
  std::size_t small_bytes = 32u << 10;   // tensors up to this size are grouped
  std::size_t group_bytes = 256u << 10;  // a group is closed when it reaches this size
  Schedule schedule = Schedule::wait_free;
  Partition partition = Partition::balanced;
  int compute_threads = 1;  // threads that multiply factors

  std::chrono::milliseconds timeout{300'000};  // the one deadline; the others are derived from it
};

}  // namespace poseidon
