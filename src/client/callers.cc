#include "client/callers.h"

#include <algorithm>
#include <utility>

#include "base/thread.h"

namespace poseidon {

namespace {

thread_local pthread_t acts_for = 0;  // 0: this thread itself

pthread_t id_of_this_thread() {
  const World* const world = World::current();
  return world == nullptr ? ::pthread_self() : static_cast<pthread_t>(world->this_thread());
}

}  // namespace

Callers::Caller& Callers::own() {
  if (const auto owner = std::ranges::find(callers_, acts_for, &Caller::id);
      acts_for != 0 && owner != callers_.end() && !owner->lives.expired())
    return *owner;
  const pthread_t id = id_of_this_thread();
  const auto found = std::ranges::find(callers_, id, &Caller::id);
  if (found == callers_.end()) return callers_.emplace_back(Caller{id, life_of_this_thread()});
  if (found->lives.expired()) *found = {id, life_of_this_thread()};  // an earlier thread had the same id
  return *found;
}

void Callers::act_for(pthread_t owner) {
  acts_for = owner;
  if (owner != 0) std::erase_if(callers_, [](const Caller& caller) { return caller.id == id_of_this_thread(); });
}

Callers::Inside::Inside(Callers& callers, std::function<bool()> done)
    : callers_(callers), wait_{std::move(done)}, outer_(std::exchange(callers.own().wait, &wait_)) {}

Callers::Inside::~Inside() { callers_.own().wait = outer_; }

bool Callers::all_wait_since(std::int64_t time_ns) {
  std::erase_if(callers_, [](const Caller& caller) { return caller.lives.expired(); });
  return !expects_others_ && !callers_.empty() && std::ranges::all_of(callers_, [&](const Caller& caller) {
    return caller.wait != nullptr && caller.wait->begun_ns < time_ns && !caller.wait->done();
  });
}

}  // namespace poseidon
