#include "base/one_thread.h"

#ifdef POSEIDON_CHECKS

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "base/invariant.h"

namespace poseidon {

namespace {

// A thread that has been joined may stay in the kernel's table for a moment.
constexpr int kLooks = 100;
constexpr std::chrono::milliseconds kPause{1};

bool has_ended(pid_t thread) { return ::syscall(SYS_tgkill, ::getpid(), thread, 0) != 0 && errno == ESRCH; }

/// Such as "thread 4711 (psd-client)".
std::string name_of(pid_t thread) {
  std::string text = "thread " + std::to_string(thread);
  std::array<char, 32> name{};
  std::FILE* const file = std::fopen(("/proc/self/task/" + std::to_string(thread) + "/comm").c_str(), "re");
  if (file == nullptr) return text;
  if (std::fscanf(file, "%31[^\n]", name.data()) == 1) text += std::string(" (") + name.data() + ")";
  static_cast<void>(std::fclose(file));
  return text;
}

}  // namespace

pid_t OneThread::this_thread() {
  thread_local const pid_t number = ::gettid();
  return number;
}

void OneThread::take_from(pid_t owner, const char* file, int line) const {
  for (int look = 0; look < kLooks; ++look) {
    if (has_ended(owner)) return owner_.store(this_thread(), std::memory_order_relaxed);
    std::this_thread::sleep_for(kPause);
  }
  break_down((name_of(this_thread()) + " uses " + of_ + ", which belongs to " + name_of(owner)).c_str(), file, line);
}

void OneThread::refuse_owner(const char* file, int line) const {
  break_down((name_of(this_thread()) + " must not call this, because " + of_ + " belongs to it").c_str(), file, line);
}

}  // namespace poseidon

#endif  // POSEIDON_CHECKS
