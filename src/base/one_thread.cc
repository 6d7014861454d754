#include "base/one_thread.h"

#ifdef POSEIDON_CHECKS

#include <chrono>

#include "base/invariant.h"

namespace poseidon {

namespace {

// A thread that has been joined may stay in the kernel's table for a moment.
constexpr int kLooks = 100;
constexpr std::chrono::milliseconds kPause{1};

}  // namespace

void OneThread::take_from(ThreadNumber owner, const char* file, int line) const {
  for (int look = 0; look < kLooks; ++look) {
    if (has_ended(owner)) return owner_.store(this_thread_number(), std::memory_order_relaxed);
    pause_for(kPause);
  }
  break_down(
      (name_of_thread(this_thread_number()) + " uses " + of_ + ", which belongs to " + name_of_thread(owner)).c_str(),
      file, line);
}

void OneThread::refuse_owner(const char* file, int line) const {
  break_down((name_of_thread(this_thread_number()) + " must not call this, because " + of_ + " belongs to it").c_str(),
             file, line);
}

}  // namespace poseidon

#endif  // POSEIDON_CHECKS
