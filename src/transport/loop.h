// Loop: one thread that owns its flows and everything their receivers keep. Nothing inside locks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "poseidon/status.h"

namespace poseidon {

class Loop {
 public:
  /// Starts the thread. `name` shows in `top -H` and debuggers (15 characters count).
  explicit Loop(const std::string& name);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Runs the tasks posted so far (and those that they post), drops watches and timers, then ends the
  /// thread. For owners that share a loop: whoever is destroyed first stops it, after all have shut
  /// down. Once only counts; never from the loop's own thread.
  void stop();

  /// Runs `task` on the loop's thread, in the order of posting. Any thread; never blocks.
  void post(std::function<void()> task);
  /// Runs `task` on the loop's thread and returns when it has run. Any thread, the loop's too.
  void call(const std::function<void()>& task);
  bool in_loop_thread() const;

  // The rest: loop thread only.

  /// Grows from one wait for events to the next: what is ready at the same time is handled in the same round.
  std::uint64_t round() const;

  /// Calls `handler(events)` when the descriptor is ready (EPOLLIN, EPOLLOUT, …; level-triggered).
  /// The descriptor stays the caller's; unwatch before closing it. A handler may watch and unwatch
  /// any descriptor, its own too; after unwatch returns the handler is not called again.
  Status watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> handler);
  Status rewatch(int fd, std::uint32_t events);
  void unwatch(int fd);

  /// Calls `task` once, not before `when`.
  using TimerId = std::uint64_t;
  TimerId call_at(Clock::time_point when, std::function<void()> task);
  void cancel(TimerId timer);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace poseidon
