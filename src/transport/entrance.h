// Entrance: a listening socket at which strangers prove that they know a secret before anything else is read.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "transport/admission.h"
#include "transport/connection_handshake.h"
#include "transport/loop.h"

namespace poseidon {

/// What waits at an entrance is bounded, so that a flood of connections takes the loop little time and memory: of all
/// and of one source the oldest goes when another comes, and none stays longer than Admission::patience.
class Entrance {
 public:
  static constexpr std::size_t kMostStrangers = 256;
  static constexpr std::size_t kMostOfOneSource = kMostStrangers / 4;

  /// The peer knows the secret; what it came with is there to be taken.
  using OnEnter = std::function<void(FileDescriptor socket, ConnectionHandshake& handshake)>;
  /// Whom a new connection is from, for the bound on each; nullopt: somebody whom no secret lets in.
  using SourceOf = std::function<std::optional<std::string>(int socket)>;

  /// `socket` listens and does not block. Any thread.
  Entrance(Loop& loop, FileDescriptor socket, wire::Purpose purpose, Admission admission, SourceOf source_of,
           OnEnter on_enter);
  /// Loop thread only, as all below.
  ~Entrance();
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;

  Status start();

 private:
  struct Stranger {
    FileDescriptor socket;
    std::string source;
    Clock::time_point leaves;
    ConnectionHandshake handshake;
  };
  using Place = std::list<Stranger>::iterator;

  void accept_some();
  void admit(FileDescriptor socket);
  void advance_one(Place place);
  void make_room(const std::string& source);
  void turn_away(Place place);
  void turn_away_late();
  void pause();

  Loop& loop_;
  const FileDescriptor socket_;
  const wire::Purpose purpose_;
  const Admission admission_;
  const SourceOf source_of_;
  const OnEnter on_enter_;
  std::list<Stranger> strangers_;  // the oldest first
  Loop::TimerId resume_timer_ = 0;
  Loop::TimerId patience_timer_ = 0;  // 0: nobody waits
};

}  // namespace poseidon
