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

/// How a server adds up what its workers send (Parameter Hub §3.2.2).
enum class Aggregation : std::uint8_t {
  streaming,  // tall: the chunk's core adds while the bytes arrive
  at_once,    // tall: the chunk's core adds all parts in one pass when the last one is in
  wide,       // many threads on one array when its last part is in: the baseline
};

/// The order in which the parts of a sum are added.
enum class ReduceOrder : std::uint8_t {
  rank,     // bitwise repeatable from run to run
  arrival,  // whoever comes first is added first
};

/// What a server core is responsible for (Parameter Hub §4.5).
enum class Assignment : std::uint8_t {
  chunk,   // its chunks, from all workers ("key by interface/core")
  worker,  // its workers; chunks are handed to their owner and back ("worker by interface"): the baseline
};

/// What carries messages between processes.
enum class Medium : std::uint8_t {
  automatic,  // shared memory between processes of one host, TCP otherwise
  tcp,
  shm,
  ucx,  // where the build found UCX
};

/// What happens to a job that has lost a process (docs/decisions/0016-generations.md).
enum class OnFailure : std::uint8_t {
  abort,   // every rank ends with the words of the first that failed
  rejoin,  // the others wait for its replacement and go on with it
  shrink,  // they go on without it; a replacement is taken in when it comes
};

/// What a step does about workers that come late (docs/decisions/0019-stragglers.md).
enum class Stragglers : std::uint8_t {
  wait,  // it waits for them
  drop,  // it ends without them; they get its result when they come
};

/// What a worker that has pushed waits for, where servers update (docs/decisions/0019-stragglers.md).
enum class Consistency : std::uint8_t {
  bsp,    // for every other worker's push of the step
  ssp,    // until nobody is more than `staleness` steps behind it
  async,  // for nobody
};

/// The settings of one process. All processes of a job must agree on most of them; `Client::connect` checks that.
struct Options {
  int rank = 0;        // with OnFailure::shrink this process's slot: its rank counts those who are there
  int world_size = 1;  // with OnFailure::shrink the number of slots
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 29500;
  std::string job = "default";  // ranks of different jobs never talk to each other
  // What all processes of the job prove to know before anything else is said (SECURITY.md), at least 16 bytes; empty:
  // none, whoever can connect is let in. One a line: a standalone server takes all of them, a worker proves the first.
  std::string secret;
  // TLS 1.3 on every TCP connection, with keys made from the secret; all processes of the job must say the same. What
  // stays on one host (shared memory) is not encrypted.
  bool tls = false;

  // Addresses or devices to listen on, all used at once; empty: the one that leads to master_addr.
  std::vector<std::string> interfaces;
  std::vector<std::string> servers;  // "host:port" of dedicated servers; empty: every worker hosts a shard
  Medium transport = Medium::automatic;
  int server_cores = 1;  // loops of this process's server; at least one per interface
  int flows = 1;         // connections from each worker to each server core

  std::size_t chunk_bytes = 256u << 10;  // largest piece of a tensor that one core holds; 0: measured ("auto")
  std::size_t small_bytes = 32u << 10;   // tensors up to this size are grouped
  std::size_t group_bytes = 1u << 20;    // a group is closed when it reaches this size
  Schedule schedule = Schedule::wait_free;
  Partition partition = Partition::balanced;
  Aggregation aggregation = Aggregation::streaming;
  ReduceOrder reduce_order = ReduceOrder::rank;
  Assignment assignment = Assignment::chunk;
  int priority_classes = 2;         // flows between each pair of peers, by urgency (Geryon §III-A)
  std::vector<int> dscp = {46, 0};  // code points that mark the classes, the most urgent first; 0: not marked
  int compute_threads = 1;          // threads that multiply factors

  Stragglers stragglers = Stragglers::wait;
  double straggler_factor = 3;  // drop: how many deviations after the median worker a step ends
  int straggler_steps = 8;      // drop: a worker that is so many steps behind is waited for; 1 to 64
  Consistency consistency = Consistency::bsp;
  int staleness = 3;  // ssp: steps

  OnFailure on_failure = OnFailure::abort;
  int min_workers = 1;           // shrink: fewer than these wait for more
  std::uint32_t generation = 0;  // the last one (Client::generation) that this process was part of; 0: none

  std::size_t memory_limit = 0;  // bytes that one job may hold on one server; 0: no limit of its own
  // Bytes that all jobs together may hold on one server; 0: no limit, and half of the machine's memory for a server
  // that stands alone.
  std::size_t server_memory = 0;
  int max_jobs = 64;  // that a server which stands alone takes at once, for each secret

  // Where servers write what they keep (docs/checkpoints.md), the same for all of a job; empty: nowhere.
  std::string checkpoint_dir;
  std::uint64_t checkpoint_every = 100;  // steps
  int checkpoint_keep = 2;               // complete versions that stay

  std::string flight_record;  // the directory for flight records (docs/flight-records.md); empty: none are written

  std::chrono::milliseconds timeout{300'000};  // the one deadline; the others are derived from it
};

/// Whether this build has OpenSSL, which Options::tls needs.
bool tls_available();

}  // namespace poseidon
