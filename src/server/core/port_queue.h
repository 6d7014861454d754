// PortQueue: who may use a port next while more is asked of it than it carries. Jobs have equal shares.
//
// TCP shares a port by connection, so a job with more workers, connections or larger chunks gets more. Who knows the
// port's rate can do better: nothing is moved faster than that, and what has to wait goes in the order of start-time
// fair queueing (docs/decisions/0040-port-queue.md).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>

namespace poseidon {

/// One direction of a port. Only its core's loop uses it.
class PortQueue {
 public:
  /// What may go at once after a pause: as much as in this time. It makes up for late timers.
  static constexpr std::chrono::milliseconds kBurst{5};

  /// One job's use of it.
  struct Account {
    double end = 0;  // where its next message begins, if others are not further
  };

  /// 0: everything goes at once.
  explicit PortQueue(double bytes_per_second) : ns_per_byte_(bytes_per_second == 0 ? 0 : 1e9 / bytes_per_second) {}

  /// Returns true if the job's message may go now. Otherwise `go` runs when it may, in a call of `run`.
  template <typename Go>
  bool ask(Account& job, std::size_t size_bytes, std::int64_t time_ns, const Go& go) {
    if (ns_per_byte_ == 0) return true;
    const double begin = std::max(now_, job.end);
    job.end = begin + static_cast<double>(size_bytes);
    if (waiting_.empty() && free_ns_ <= time_ns) {
      use(begin, size_bytes, time_ns);
      return true;
    }
    waiting_.emplace(begin, Waiting{size_bytes, go});
    return false;
  }

  /// Lets go whose turn has come. Returns when it wants to be called again; nothing if nobody waits.
  std::optional<std::int64_t> run(std::int64_t time_ns);

 private:
  struct Waiting {
    std::size_t size_bytes = 0;
    std::function<void()> go;
  };
  void use(double begin, std::size_t size_bytes, std::int64_t time_ns);

  const double ns_per_byte_;
  std::int64_t free_ns_ = 0;                // when what has gone will have passed the port
  double now_ = 0;                          // where the message began that went last, in bytes of one job
  std::multimap<double, Waiting> waiting_;  // by where they begin
};

}  // namespace poseidon
