// OneThread: checks that an object is used by one thread only (docs/decisions/0062-checked-threads.md).
//
// The checks are in builds with POSEIDON_CHECKS: those of .ci/run, of sanitizers, and Debug. Elsewhere they are empty.
#pragma once

#ifdef POSEIDON_CHECKS
#include <atomic>

#include "base/thread.h"
#else
#include <type_traits>
#endif

namespace poseidon {

#ifdef POSEIDON_CHECKS

/// A member of a class whose objects belong to one thread each. The first thread that calls `check` is the owner. Any
/// other thread that calls it ends the process with a message, which names the class, the place and both threads.
///
/// When the owner has ended, the object belongs to the next thread that uses it. So whoever has stopped a loop may
/// destroy what is left of it. A copied or moved object belongs to nobody until it is used.
class OneThread {
 public:
  /// `of` names the class; it has static storage.
  explicit constexpr OneThread(const char* of) : of_(of) {}
  OneThread(const OneThread& other) noexcept : of_(other.of_) {}
  OneThread& operator=(const OneThread& /*other*/) noexcept {
    hand_over();
    return *this;
  }
  ~OneThread() = default;

  void check(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    const ThreadNumber caller = this_thread_number();
    ThreadNumber owner = owner_.load(std::memory_order_relaxed);
    if (owner == caller) return;
    if (owner == 0 && owner_.compare_exchange_strong(owner, caller, std::memory_order_relaxed)) return;
    take_from(owner, file, line);
  }
  /// Checks, and then hands out a member of the object.
  template <typename Member>
  Member& checked(Member& member, const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    check(file, line);
    return member;
  }
  /// The next thread that calls `check` is the owner. Whoever calls this sees to it that no thread uses the object now.
  void hand_over() const { owner_.store(0, std::memory_order_relaxed); }
  /// A call of a class whose objects may be used by one thread at a time, whichever it is.
  class Turn {
   public:
    explicit Turn(const OneThread& object, const char* file = __builtin_FILE(), int line = __builtin_LINE())
        : object_(object) {
      object_.check(file, line);
    }
    ~Turn() { object_.hand_over(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const OneThread& object_;
  };

  /// Aborts if the owner calls this.
  void check_other(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    if (owner_.load(std::memory_order_relaxed) == this_thread_number()) refuse_owner(file, line);
  }

 private:
  /// Takes the object from a thread that has ended, or aborts.
  void take_from(ThreadNumber owner, const char* file, int line) const;
  [[noreturn]] void refuse_owner(const char* file, int line) const;

  const char* of_;
  mutable std::atomic<ThreadNumber> owner_{0};  // 0: nobody
};

#else

class OneThread {
 public:
  explicit constexpr OneThread(const char* /*of*/) {}
  void check() const {}
  template <typename Member>
  Member& checked(Member& member) const {
    return member;
  }
  void hand_over() const {}
  struct Turn {
    explicit Turn(const OneThread& /*object*/) {}
  };
  void check_other() const {}
};
static_assert(std::is_empty_v<OneThread>, "it costs nothing as a member with [[no_unique_address]]");

#endif

}  // namespace poseidon
