// Server: one parameter server, as a process of its own (`poseidon server`). Workers start embedded servers themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "poseidon/traffic.h"

namespace poseidon {

/// What a server knows of one job. The bytes are those of this generation.
struct JobReport : TrafficStats {
  std::string name;
  std::size_t secret = 0;  // which of the secrets in Options::secret its workers know, from 1; 0: the server has none
  bool lost = false;  // it has lost workers and has none here: it may come back, until the server's timeout has passed
  std::uint32_t generation = 0;        // of the job (docs/glossary.md)
  std::uint32_t worker_count = 0;      // workers that belong to the job
  std::uint32_t connected_count = 0;   // workers that are connected to this server
  std::size_t memory_bytes = 0;        // what counts towards Options::memory_limit
  std::size_t memory_limit_bytes = 0;  // 0: the job has no limit of its own
  std::size_t open_chunk_count = 0;    // chunks whose step has begun and not ended
  double age_s = 0;                    // since the first worker of this generation came
  double silent_s = 0;                 // since anything came from any of its workers, or since it was lost
};

/// What a server knows of all its jobs. The bytes are those since it started, also of jobs that have ended.
struct ServerReport : TrafficStats {
  std::vector<JobReport> jobs;   // by secret and name
  std::size_t memory_bytes = 0;  // what counts towards Options::server_memory
  std::size_t memory_limit_bytes = 0;
};

/// A running parameter server. It stops when it is destroyed. Any thread may call its methods.
class Server {
 public:
  /// Listens on `options.interfaces` and serves until shutdown. Its first core listens on `port` (0: any), each further
  /// core on the next port. Without interfaces it listens on loopback; "0.0.0.0" means all addresses of the host. It
  /// accepts jobs of every secret in `options.secret`. ErrorCode::unreachable: an address cannot be bound.
  static Result<std::unique_ptr<Server>> listen(const Options& options, std::uint16_t port);
  virtual ~Server() = default;

  /// "host:port" that workers connect to.
  virtual std::string address() const = 0;
  /// Messages about what does not work although the server goes on, the oldest first: checkpoints that could not be
  /// written or used. Any thread.
  virtual std::vector<std::string> notices() const = 0;

  /// Returns what the server knows now. It waits for the server's loops, and costs them time in proportion to the
  /// number of connections and chunks.
  virtual ServerReport report() = 0;
  /// From now on takes no job that is not here. Workers of others are refused, and are told to use another server. A
  /// job that has lost workers may come back as its next generation within `Options::timeout`.
  virtual void drain() = 0;
  virtual bool draining() const = 0;
  /// Whether it is draining and the last job has gone.
  virtual bool drained() const = 0;
  /// Ends one job. All its workers fail (ErrorCode::aborted), what it holds is given back, and no other job notices.
  /// The job cannot come back until it is started again. `secret`: JobReport::secret. Returns false if there is no such
  /// job.
  virtual bool evict(const std::string& job, std::size_t secret) = 0;

  /// Ends the server. Workers that are still connected are told.
  virtual void shutdown() = 0;
};

}  // namespace poseidon
