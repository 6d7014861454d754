// Loop: one thread that owns its flows and everything that their receivers keep. Nothing inside it needs a lock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/clock.h"
#include "base/pinned.h"
#include "poseidon/status.h"
#include "transport/coding_choice.h"

namespace poseidon {

class Loop : private Pinned {
 public:
  /// Starts the thread. `name` shows in `top -H` and debuggers (15 characters count).
  explicit Loop(const std::string& name);
  ~Loop();

  /// Runs the tasks that were posted so far, and those that they post. Then it drops watches and timers, and ends the
  /// thread. If several owners share a loop, the one that is destroyed first stops it, after all have shut down.
  /// Further calls have no effect. Any thread but the loop's may call it.
  void stop();

  /// Runs `task` on the loop's thread, in the order of posting. Any thread; never blocks.
  void post(std::function<void()> task);
  /// Runs `task` on the loop's thread and returns what it returns. Any thread, including the loop's.
  template <typename Task>
  auto call(Task&& task) {
    if constexpr (std::is_void_v<std::invoke_result_t<Task&>>) {
      run(task);
    } else {
      std::optional<std::invoke_result_t<Task&>> value;
      run([&] { value.emplace(task()); });
      return std::move(*value);
    }
  }
  bool in_loop_thread() const;

  /// Abort if the wrong thread calls them, in builds with checks (base/one_thread.h). The first is for what belongs to
  /// the loop's thread. When the loop has been stopped, that belongs to the thread that uses it next. The other is for
  /// what waits for the loop's thread. `checked` checks like the first, and then hands out a member of what belongs to
  /// the loop's thread.
#ifdef POSEIDON_CHECKS
  void check_thread(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const;
  void check_other_thread(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const;
  template <typename Member>
  Member& checked(Member& member, const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    check_thread(file, line);
    return member;
  }
#else
  void check_thread() const {}
  void check_other_thread() const {}
  template <typename Member>
  Member& checked(Member& member) const {
    return member;
  }
#endif

  // Only the loop's thread may call the following.

  /// A number that grows with each wait for events. Events that are ready at the same time are handled in one round.
  std::uint64_t round() const;

  /// Whether its flows should code what they send, as far as its own time tells.
  CodingChoice& coding_choice() const;

  /// Calls `handler(events)` when the descriptor is ready (EPOLLIN, EPOLLOUT, …; level-triggered). The caller owns the
  /// descriptor and must unwatch it before closing it. A handler may watch and unwatch any descriptor, including its
  /// own. After unwatch returns, the handler is not called again.
  Status watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> handler);
  Status rewatch(int fd, std::uint32_t events);
  void unwatch(int fd);

  /// Calls `task` once, not before `when`.
  using TimerId = std::uint64_t;
  TimerId call_at(Clock::time_point when, std::function<void()> task);
  void cancel(TimerId timer);

 private:
  /// Runs `task` on the loop's thread and returns when it has run.
  void run(const std::function<void()>& task);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace poseidon
