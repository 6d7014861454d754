#include "transport/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/file_descriptor.h"
#include "base/float_mode.h"
#include "base/invariant.h"
#include "base/one_thread.h"
#include "base/thread.h"

namespace poseidon {

namespace {

constexpr std::uint64_t kWakeKey = ~std::uint64_t{0};
constexpr std::size_t kEventsPerWait = 64;
constexpr std::chrono::milliseconds kLongestWait{60'000};

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "poseidon: loop: %s: %s\n", what, errno_text(errno).c_str());
  std::abort();
}

/// For epoll_wait.
int wait_ms(Clock::time_point latest) {
  if (latest == Clock::time_point::min()) return 0;
  const auto longest = Clock::duration(kLongestWait);
  const auto left = latest == Clock::time_point::max() ? longest : std::min(latest - Clock::now(), longest);
  return std::max(static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()), 0);
}

}  // namespace

struct Loop::State {
  struct Watch {
    std::uint32_t generation = 0;
    std::function<void(std::uint32_t)> handler;
  };

  const KeepsTime keeps_time;
  World* const world = World::current();  // null: it waits for descriptors, too
  FileDescriptor epoll;
  FileDescriptor wake;
  Thread thread;
  std::atomic<ThreadNumber> thread_number{0};
  [[no_unique_address]] OneThread runner{"a loop"};                          // the loop's thread, for ever
  [[no_unique_address]] OneThread user{"an object of a loop's own thread"};  // the same until the loop is stopped

  std::mutex mutex;
  std::vector<std::function<void()>> tasks;  // guarded by mutex
  // True from before the last look at `tasks` until the wait has ended. Only then does a post have to write to the
  // eventfd.
  std::atomic<bool> asleep{false};

  // Only the loop thread uses the following.
  bool stopping = false;
  std::uint64_t round = 0;
  CodingChoice coding_choice;
  std::vector<std::function<void()>> running;
  std::unordered_map<int, std::shared_ptr<Watch>> watches;
  std::uint32_t next_generation = 0;
  std::map<std::pair<Clock::time_point, TimerId>, std::function<void()>> timers;
  std::unordered_map<TimerId, Clock::time_point> timer_times;
  TimerId next_timer = 1;

  void open();
  void run();
  bool run_tasks();
  void run_due_timers();
  Clock::time_point next_time();
  void wait_and_dispatch();
  void wait_for_events(Clock::time_point latest);
  void wake_up() const;
  void dispatch(const epoll_event& event);
  void drop_registrations();
};

void Loop::State::open() {
  if (world != nullptr) return;
  epoll = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) die("epoll_create1");
  wake = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) die("eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) die("epoll_ctl");
}

void Loop::State::run() {
  while (!stopping) {
    run_tasks();
    run_due_timers();
    if (!stopping) wait_and_dispatch();
  }
  while (run_tasks()) {
  }
  drop_registrations();
  while (run_tasks()) {
  }
}

bool Loop::State::run_tasks() {
  {
    const std::lock_guard lock(mutex);
    running.swap(tasks);
  }
  if (running.empty()) return false;
  for (auto& task : running) {
    task();
    task = nullptr;  // destroys what the task holds before the next task runs
  }
  running.clear();
  return true;
}

void Loop::State::run_due_timers() {
  if (timers.empty()) return;
  // The due timers are collected first. A task may cancel another due timer, and a timer that it adds waits for the
  // next round.
  std::vector<std::pair<Clock::time_point, TimerId>> due;
  const auto now = Clock::now();
  for (auto it = timers.begin(); it != timers.end() && it->first.first <= now; ++it) due.push_back(it->first);
  for (const auto& key : due) {
    const auto it = timers.find(key);
    if (it == timers.end()) continue;
    const auto task = std::move(it->second);
    timers.erase(it);
    timer_times.erase(key.second);
    task();
  }
}

/// When there is something to do, if nothing comes before.
Clock::time_point Loop::State::next_time() {
  {
    const std::lock_guard lock(mutex);
    if (!tasks.empty()) return Clock::time_point::min();
  }
  return timers.empty() ? Clock::time_point::max() : timers.begin()->first.first;
}

void Loop::State::wait_and_dispatch() {
  ++round;
  asleep.store(true);
  const auto latest = next_time();
  if (world == nullptr) return wait_for_events(latest);
  world->wait(this, latest.time_since_epoch().count(), "a task");  // others run, too, if there is one already
  asleep.store(false);
}

void Loop::State::wait_for_events(Clock::time_point latest) {
  std::array<epoll_event, kEventsPerWait> events{};
  coding_choice.on_wait(now_ns());
  const int count = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), wait_ms(latest));
  coding_choice.on_wake(now_ns());
  asleep.store(false);
  if (count < 0 && errno != EINTR) die("epoll_wait");
  for (int i = 0; i < count; ++i) dispatch(events[static_cast<std::size_t>(i)]);
}

void Loop::State::wake_up() const {
  if (world != nullptr) return world->wake(this);
  const std::uint64_t one = 1;
  while (::write(wake.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Loop::State::dispatch(const epoll_event& event) {
  if (event.data.u64 == kWakeKey) {
    std::uint64_t posts = 0;
    if (::read(wake.get(), &posts, sizeof(posts)) < 0 && errno != EAGAIN && errno != EINTR) die("read eventfd");
    return;
  }
  // The generation tells whether the descriptor was unwatched (and perhaps reused) since the wait began.
  const auto it = watches.find(static_cast<int>(event.data.u64 & 0xffffffffu));
  if (it == watches.end() || it->second->generation != event.data.u64 >> 32) return;
  const auto watch = it->second;
  watch->handler(event.events);
}

void Loop::State::drop_registrations() {
  // Moved out first, because what the closures own may unwatch and cancel while it is destroyed.
  const auto old_watches = std::exchange(watches, {});
  const auto old_timers = std::exchange(timers, {});
  timer_times.clear();
}

Loop::Loop(const std::string& name) : state_(std::make_unique<State>()) {
  state_->open();
  state_->thread = Thread(name, [state = state_.get()] {
    state->thread_number.store(this_thread_number());
    state->runner.check();
    state->user.check();
    keep_denormals();
    state->run();
  });
}

Loop::~Loop() { stop(); }

void Loop::stop() {
  check_other_thread();
  if (!state_->thread.joinable()) return;
  post([state = state_.get()] { state->stopping = true; });
  state_->thread.join();
  state_->user.hand_over();
}

void Loop::post(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
  }
  if (state_->asleep.load() && state_->asleep.exchange(false)) state_->wake_up();
}

void Loop::run(const std::function<void()>& task) {
  if (in_loop_thread()) return task();
  const Completion ran = Completion::make();
  post([&task, ran] {
    task();
    ran.complete();
  });
  ran.wait();
}

bool Loop::in_loop_thread() const { return state_->thread_number.load() == this_thread_number(); }

#ifdef POSEIDON_CHECKS
void Loop::check_thread(const char* file, int line) const { state_->user.check(file, line); }

void Loop::check_other_thread(const char* file, int line) const { state_->runner.check_other(file, line); }
#endif

std::uint64_t Loop::round() const {
  check_thread();
  return state_->round;
}

CodingChoice& Loop::coding_choice() const { return checked(state_->coding_choice); }

Status Loop::watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> handler) {
  check_thread();
  if (state_->world != nullptr) return {ErrorCode::invalid_argument, "a simulated loop watches no descriptors"};
  const std::uint32_t generation = state_->next_generation++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = std::uint64_t{generation} << 32 | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return {ErrorCode::invalid_argument, concat("cannot watch descriptor ", fd, ": ", errno_text(errno))};
  }
  state_->watches[fd] = std::make_shared<State::Watch>(State::Watch{generation, std::move(handler)});
  return {};
}

Status Loop::rewatch(int fd, std::uint32_t events) {
  check_thread();
  const auto it = state_->watches.find(fd);
  if (it == state_->watches.end()) {
    return {ErrorCode::invalid_argument, concat("descriptor ", fd, " is not watched")};
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = std::uint64_t{it->second->generation} << 32 | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(state_->epoll.get(), EPOLL_CTL_MOD, fd, &event) != 0) {
    return {ErrorCode::invalid_argument, concat("cannot watch descriptor ", fd, ": ", errno_text(errno))};
  }
  return {};
}

void Loop::unwatch(int fd) {
  check_thread();
  const auto it = state_->watches.find(fd);
  if (it == state_->watches.end()) return;
  const auto watch = it->second;  // what the handler owns is destroyed when the map is consistent again
  state_->watches.erase(it);
  ::epoll_ctl(state_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Loop::TimerId Loop::call_at(Clock::time_point when, std::function<void()> task) {
  check_thread();
  invariant(static_cast<bool>(task), "a timer has a task");
  const TimerId id = state_->next_timer++;
  state_->timers.emplace(std::pair{when, id}, std::move(task));
  state_->timer_times.emplace(id, when);
  return id;
}

void Loop::cancel(TimerId timer) {
  check_thread();
  const auto it = state_->timer_times.find(timer);
  if (it == state_->timer_times.end()) return;
  const auto task = state_->timers.extract({it->second, timer});  // destroyed when the maps are consistent again
  state_->timer_times.erase(it);
}

}  // namespace poseidon
