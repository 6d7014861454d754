#include "base/clock.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <ranges>
#include <thread>
#include <utility>
#include <vector>

namespace poseidon {

namespace {

constexpr std::chrono::milliseconds kTick{100};
/// A gap between two ticks that is longer means that the process did not run. A busy machine makes shorter ones.
constexpr std::int64_t kLongestGapNs = 1'000'000'000;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMostPauses = 64;  // older ones are too long ago for any deadline

struct Pause {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

class Ticker {
 public:
  static Ticker& instance() {
    static Ticker& ticker = *new Ticker;  // threads may read the clock until the process ends
    return ticker;
  }

  /// The clock stops a gap after each tick, until the next tick says what has been missed. Otherwise a thread that runs
  /// again before the ticking one would see a deadline that has passed during the pause. A tick writes what was missed
  /// first, and a reader reads it last, so that the clock never goes back.
  std::int64_t active_ns() const {
    const std::int64_t most_ns = most_active_ns_.load(std::memory_order_acquire);
    return std::min(now_ns() - missed_ns_.load(std::memory_order_acquire), most_ns);
  }

  std::int64_t ran_since_ns(std::int64_t left_ns) {
    const std::lock_guard lock(mutex_);
    std::int64_t time_ns = std::min(now_ns(), stops_ns_);
    for (const Pause& pause : pauses_ | std::views::reverse) {
      if (left_ns <= time_ns - pause.end_ns) break;
      left_ns -= time_ns - pause.end_ns;
      time_ns = pause.begin_ns;
    }
    return time_ns - left_ns;
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    ++users_;
    if (thread_) return;
    stop_at(now_ns() + kLongestGapNs);
    thread_.emplace([this, number = ++thread_number_] { tick(number); });
  }

  void end() {
    std::unique_lock lock(mutex_);
    if (--users_ > 0 || !thread_) return;
    std::thread ended = std::move(*thread_);
    thread_.reset();
    ++thread_number_;  // another thread may begin before this one has ended
    look();
    stop_at(kNever);
    wake_.notify_all();
    lock.unlock();
    ended.join();
  }

 private:
  Ticker() {
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().go_on_without_thread(); });
  }

  void tick(std::uint64_t number) {
    ::pthread_setname_np(::pthread_self(), "psd-clock");
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait_for(lock, kTick, [this, number] { return thread_number_ != number; });
      if (thread_number_ != number) return;
      look();
      stop_at(now_ns() + kLongestGapNs);
    }
  }

  /// A child of fork() has only the thread that called it.
  void go_on_without_thread() {
    if (thread_) gone_.push_back(std::move(*thread_));  // a thread that is not there cannot be joined
    thread_.reset();
    stop_at(kNever);
    mutex_.unlock();
  }

  // Only with the mutex:
  void look() {
    if (const std::int64_t time_ns = now_ns(); time_ns > stops_ns_) note({stops_ns_, time_ns});
  }
  void note(const Pause& pause) {
    missed_ns_.store(missed_ns_.load(std::memory_order_relaxed) + pause.end_ns - pause.begin_ns,
                     std::memory_order_release);
    pauses_.push_back(pause);
    if (pauses_.size() > kMostPauses) pauses_.pop_front();
  }
  void stop_at(std::int64_t time_ns) {
    stops_ns_ = time_ns;
    most_active_ns_.store(time_ns == kNever ? kNever : time_ns - missed_ns_.load(std::memory_order_relaxed),
                          std::memory_order_release);
  }

  std::atomic<std::int64_t> most_active_ns_{kNever};
  std::atomic<std::int64_t> missed_ns_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::int64_t stops_ns_ = kNever;
  std::deque<Pause> pauses_;
  std::optional<std::thread> thread_;
  std::vector<std::thread> gone_;
  std::uint64_t thread_number_ = 0;  // of the thread that ticks, or of the next one
  std::size_t users_ = 0;
};

}  // namespace

Clock::time_point Clock::now() noexcept {
  const World* const world = World::current();
  return time_point(std::chrono::nanoseconds(world == nullptr ? Ticker::instance().active_ns() : world->now_ns()));
}

std::int64_t ran_since_ns(std::chrono::nanoseconds time) {
  if (const World* const world = World::current()) return world->now_ns() - time.count();
  return Ticker::instance().ran_since_ns(time.count());
}

KeepsTime::KeepsTime() : real_(World::current() == nullptr) {
  if (real_) Ticker::instance().begin();
}
KeepsTime::~KeepsTime() {
  if (real_) Ticker::instance().end();
}

}  // namespace poseidon
