#include "simulation/simulated_world.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/invariant.h"
#include "simulation/faults.h"

namespace poseidon::testing {

namespace {

constexpr std::int64_t kWallBegin = 1'767'225'600'000'000'000;  // 2026
constexpr std::uint64_t kShortestWakeUpNs = 1'000;
constexpr std::uint64_t kLongestWakeUpNs = 30'000;

std::atomic<ThreadNumber> next_number{kFirstSimulatedThread};  // of all worlds

}  // namespace

void Trace::add(std::string_view part) {
  for (const char c : part) digest_ = (digest_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  if (kept_) text_ += part;
}

void Trace::note(std::int64_t time_ns, std::string_view who, std::string_view what) {
  std::array<char, 24> time{};
  const char* const end = std::to_chars(time.data(), time.data() + time.size(), time_ns).ptr;
  add({time.data(), static_cast<std::size_t>(end - time.data())});
  add(" ");
  add(who);
  add(" ");
  add(what);
  add("\n");
  ++line_count_;
}

SimulatedWorld::SimulatedWorld(std::uint64_t seed, std::chrono::nanoseconds longest)
    : seed_(seed), end_ns_(kBegin + longest.count()) {}

SimulatedWorld::~SimulatedWorld() = default;

void SimulatedWorld::run(std::function<void()> body) {
  invariant(World::current() == nullptr, "a world is not simulated in another");
  const Entered entered(*this);
  const ThreadNumber first = start_thread("main", std::move(body));
  while (!has_ended(first)) take_turn();
  if (!threads_.empty()) stand_still("its first thread has ended before others");
}

void SimulatedWorld::take_turn() {
  const auto next = turns_.begin();
  if (next == turns_.end() || next->first.time_ns == kForEver) stand_still("nobody can go on");
  if (next->first.time_ns > end_ns_) stand_still("it takes too long");
  now_ns_ = std::max(now_ns_, next->first.time_ns);
  const ThreadNumber number = next->first.thread;
  running_ = next->second;
  turns_.erase(next);
  ++turn_count_;
  trace_.note(now_ns_ - kBegin, running_->name, running_->kind);
  running_->fiber.resume();
  Simulated& ran = *std::exchange(running_, nullptr);
  if (!ran.fiber.ended()) return;
  ran.life.reset();
  const auto ended = threads_.extract(number);
  wake(&ran);
}

SimulatedWorld::Simulated& SimulatedWorld::running() const {
  invariant(running_ != nullptr, "a simulated world is used by its own threads");
  return *running_;
}

void SimulatedWorld::note(std::string_view what) { trace_.note(now_ns_ - kBegin, running().name, what); }

std::uint64_t SimulatedWorld::random() { return mix(seed_, drawn_count_++); }

/// When somebody who is woken now runs.
std::int64_t SimulatedWorld::soon() {
  return now_ns_ + static_cast<std::int64_t>(kShortestWakeUpNs + random() % (kLongestWakeUpNs - kShortestWakeUpNs));
}

void SimulatedWorld::plan(ThreadNumber number, Simulated& thread, std::int64_t time_ns) {
  thread.turn = {time_ns, random(), number};
  turns_.emplace(thread.turn, &thread);
}

std::int64_t SimulatedWorld::wall_ns() const { return kWallBegin + now_ns_ - kBegin; }

void SimulatedWorld::fill_with_random_bytes(std::span<std::byte> out) {
  for (std::byte& one : out) one = static_cast<std::byte>(random() & 0xff);
}

ThreadNumber SimulatedWorld::start_thread(std::string name, std::function<void()> body) {
  const ThreadNumber number = next_number++;
  auto thread = std::make_unique<Simulated>(stacks_, std::move(name), std::move(body));
  plan(number, *thread, soon());
  threads_.emplace(number, std::move(thread));
  return number;
}

ThreadNumber SimulatedWorld::this_thread() const { return running().turn.thread; }

std::weak_ptr<const void> SimulatedWorld::life_of_this_thread() const { return running().life; }

std::string SimulatedWorld::name_of(ThreadNumber thread) const {
  const auto found = threads_.find(thread);
  return found == threads_.end() ? "ended" : found->second->name;
}

void SimulatedWorld::join(ThreadNumber thread) {
  for (auto found = threads_.find(thread); found != threads_.end(); found = threads_.find(thread))
    wait(found->second.get(), kForEver, "a thread's end");
}

bool SimulatedWorld::wait(const void* what, std::int64_t until_ns, const char* kind) {
  Simulated& thread = running();
  thread.what = what;
  thread.kind = kind;
  thread.woken = false;
  waiting_[what].push_back(&thread);
  plan(thread.turn.thread, thread, std::max(until_ns, soon()));
  thread.fiber.suspend();
  forget_wait(thread);
  return thread.woken;
}

void SimulatedWorld::forget_wait(Simulated& thread) {
  if (thread.what == nullptr) return;
  const auto found = waiting_.find(std::exchange(thread.what, nullptr));
  std::erase(found->second, &thread);
  if (found->second.empty()) waiting_.erase(found);
}

void SimulatedWorld::wake(const void* what) {
  const auto found = waiting_.extract(what);
  if (found.empty()) return;
  for (Simulated* thread : found.mapped()) {
    thread->what = nullptr;
    thread->woken = true;
    const std::int64_t time_ns = soon();
    if (thread->turn.time_ns <= time_ns) continue;
    turns_.erase(thread->turn);
    plan(thread->turn.thread, *thread, time_ns);
  }
}

void SimulatedWorld::stand_still(const char* why) const {
  std::fprintf(stderr, "a simulated world (seed %llu) stands still after %.3f s: %s\n",
               static_cast<unsigned long long>(seed_), std::chrono::duration<double>(elapsed()).count(), why);
  for (const auto& [number, thread] : threads_)
    std::fprintf(stderr, "  %s waits for %s\n", thread->name.c_str(), thread->kind);
  std::abort();
}

void note_in_trace(std::string_view what) {
  if (auto* const world = dynamic_cast<SimulatedWorld*>(World::current())) world->note(what);
}

}  // namespace poseidon::testing
