// Entrance: a listening socket at which peers prove that they know a secret before anything else of theirs is read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <list>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/pinned.h"
#include "transport/admission.h"
#include "transport/connection_handshake.h"
#include "transport/loop.h"

namespace poseidon {

/// Returns which of the pending connections to close before one from `source` comes. It is the oldest of that source,
/// or of all, if their number has reached its limit. Otherwise it is pending.end(). `pending` holds the oldest first.
template <typename Connection>
auto pending_to_close(std::list<Connection>& pending, const std::string& source, const PendingLimits& limits) {
  const auto is_of_source = [&](const Connection& connection) { return connection.source == source; };
  const auto of_source = static_cast<std::size_t>(std::ranges::count_if(pending, is_of_source));
  if (of_source >= limits.of_one_source) return std::ranges::find_if(pending, is_of_source);
  return pending.size() >= limits.all ? pending.begin() : pending.end();
}

/// Pending connections are bounded, so that a flood of them takes the loop little time and memory (pending_to_close).
/// None stays longer than Admission::patience.
class Entrance : private Pinned {
 public:
  /// Called when the peer has proved the secret. The callee takes the socket and what the handshake holds.
  using OnEnter = std::function<void(FileDescriptor socket, ConnectionHandshake& handshake)>;
  /// Returns whom a new connection is from, for the limit on each source. On nullopt the connection is closed, because
  /// no secret would make it acceptable.
  using SourceOf = std::function<std::optional<std::string>(int socket)>;

  /// `socket` must listen and be nonblocking. Any thread may call it.
  Entrance(Loop& loop, FileDescriptor socket, wire::Purpose purpose, Admission admission, SourceOf source_of,
           OnEnter on_enter);
  /// Only the loop's thread may call this.
  ~Entrance();

  /// Sets what is called, on the loop, when a process of this version has named another secret. Call it before `start`.
  void on_other_secret(std::function<void(int socket)> call) { on_other_secret_ = std::move(call); }

  /// Begins to accept. Any thread.
  Status start();

 private:
  struct Pending {
    FileDescriptor socket;
    std::string source;
    Clock::time_point deadline;
    ConnectionHandshake handshake;
  };
  using Place = std::list<Pending>::iterator;

  void accept_some();
  void admit(FileDescriptor socket);
  void advance_one(Place place);
  void close_pending(Place place);
  void close_late();
  void pause();

  Loop& loop_;
  const FileDescriptor socket_;
  const wire::Purpose purpose_;
  const Admission admission_;
  const SourceOf source_of_;
  const OnEnter on_enter_;
  std::function<void(int socket)> on_other_secret_;  // may be empty
  std::list<Pending> pending_;                       // the oldest first
  Loop::TimerId resume_timer_ = 0;
  Loop::TimerId patience_timer_ = 0;  // 0: no connection is pending
};

}  // namespace poseidon
