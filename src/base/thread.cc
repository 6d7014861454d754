#include "base/thread.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "base/invariant.h"
#include "poseidon/status.h"

namespace poseidon {

namespace {

constexpr std::size_t kThreadNameBytes = 15;

}  // namespace

ThreadNumber this_thread_number() {
  if (const World* const world = World::current()) [[unlikely]]
    return world->this_thread();
  thread_local const pid_t number = ::gettid();
  return number;
}

std::weak_ptr<const void> life_of_this_thread() {
  if (const World* const world = World::current()) return world->life_of_this_thread();
  thread_local const auto life = std::make_shared<const int>(0);
  return life;
}

std::string name_of_thread(ThreadNumber thread) {
  std::string text = concat("thread ", thread);
  if (thread >= kFirstSimulatedThread) {
    const World* const world = World::current();
    return world == nullptr ? text : text + " (" + world->name_of(thread) + ")";
  }
  std::array<char, 32> name{};
  std::FILE* const file = std::fopen(concat("/proc/self/task/", thread, "/comm").c_str(), "re");
  if (file == nullptr) return text;
  if (std::fscanf(file, "%31[^\n]", name.data()) == 1) text += std::string(" (") + name.data() + ")";
  static_cast<void>(std::fclose(file));
  return text;
}

bool has_ended(ThreadNumber thread) {
  if (thread >= kFirstSimulatedThread) {
    const World* const world = World::current();
    return world == nullptr || world->has_ended(thread);  // a world ends after its threads
  }
  return ::syscall(SYS_tgkill, ::getpid(), static_cast<pid_t>(thread), 0) != 0 && errno == ESRCH;
}

void pause_for(std::chrono::nanoseconds time) {
  if (World* const world = World::current()) {
    const int place = 0;  // which nobody wakes
    world->wait(&place, world->now_ns() + time.count(), "a pause");
    return;
  }
  std::this_thread::sleep_for(time);
}

Thread::Thread(std::string name, std::function<void()> body) {
  if (World* const world = World::current()) {
    simulated_ = world->start_thread(std::move(name), std::move(body));
    return;
  }
  thread_ = std::thread([thread_name = name.substr(0, kThreadNameBytes), run = std::move(body)] {
    if (!thread_name.empty()) ::pthread_setname_np(::pthread_self(), thread_name.c_str());
    run();
  });
}

Thread& Thread::operator=(Thread&& other) noexcept {
  invariant(simulated_ == 0, "a thread that is still there is not replaced");
  thread_ = std::move(other.thread_);
  simulated_ = std::exchange(other.simulated_, 0);
  return *this;
}

void Thread::join() {
  if (simulated_ == 0) return thread_.join();
  World* const world = World::current();
  invariant(world != nullptr, "a simulated thread is joined in its world");
  world->join(std::exchange(simulated_, 0));
}

void Thread::detach() {
  if (std::exchange(simulated_, 0) == 0) thread_.detach();
}

void Condition::wait_in(World& world, std::unique_lock<std::mutex>& lock, std::int64_t until_ns) {
  lock.unlock();
  world.wait(this, until_ns, "a condition");
  lock.lock();
}

Completion Completion::make() {
  Completion made;
  made.shared_ = std::make_shared<Shared>();
  return made;
}

void Completion::complete() const {
  const auto shared = shared_;  // who waits may drop the rest as soon as it has happened
  const std::lock_guard lock(shared->mutex);
  shared->happened = true;
  shared->changed.notify_all();
}

void Completion::wait() const {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [this] { return shared_->happened; });
}

bool Completion::wait_for(std::chrono::nanoseconds longest) const {
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_for(lock, longest, [this] { return shared_->happened; });
}

}  // namespace poseidon
