// Callers: the threads that use a client, and which of them are inside a wait.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/pinned.h"

namespace poseidon {

/// Its owner guards it with a mutex. A thread counts until it ends.
class Callers {
 private:
  struct Wait {
    std::function<bool()> done;
    std::int64_t begun_ns = now_ns();
  };
  struct Caller {
    pthread_t id;
    std::weak_ptr<const void> lives;
    const Wait* wait = nullptr;
  };

 public:
  /// This thread uses the client.
  void note() { static_cast<void>(own()); }

  /// From now on what this thread does counts as done by `owner`, which waits for it. 0: as its own again.
  void act_for(pthread_t owner);

  /// The caller's thread is inside a wait as long as this lives, or until `done` returns true.
  class Inside : private Pinned {
   public:
    Inside(Callers& callers, std::function<bool()> done);
    ~Inside();

   private:
    Callers& callers_;
    Wait wait_;
    const Wait* outer_;  // a signal's handler may wait inside a wait
  };

  /// Threads that are not callers yet may become such at any time.
  void expect_others() { expects_others_ = true; }

  /// Whether there are callers, no others may come, and all are inside waits that have begun before, by now_ns().
  bool all_wait_since(std::int64_t time_ns);

 private:
  Caller& own();

  std::vector<Caller> callers_;
  bool expects_others_ = false;
};

}  // namespace poseidon
