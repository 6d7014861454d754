#include "client/callers.h"

#include <algorithm>
#include <utility>

namespace poseidon {

namespace {

/// It is gone when this thread has ended.
const std::shared_ptr<const int>& life_of_this_thread() {
  thread_local const std::shared_ptr<const int> life = std::make_shared<const int>(0);
  return life;
}

}  // namespace

Callers::Caller& Callers::own() {
  const auto id = std::this_thread::get_id();
  const auto found = std::ranges::find(callers_, id, &Caller::id);
  if (found == callers_.end()) return callers_.emplace_back(Caller{id, life_of_this_thread()});
  if (found->lives.expired()) *found = {id, life_of_this_thread()};  // an earlier thread had the same id
  return *found;
}

Callers::Inside::Inside(Callers& callers, std::function<bool()> done)
    : callers_(callers), wait_{std::move(done)}, outer_(std::exchange(callers.own().wait, &wait_)) {}

Callers::Inside::~Inside() { callers_.own().wait = outer_; }

bool Callers::all_wait_since(std::int64_t time_ns) {
  std::erase_if(callers_, [](const Caller& caller) { return caller.lives.expired(); });
  return !callers_.empty() && std::ranges::all_of(callers_, [&](const Caller& caller) {
    return caller.wait != nullptr && caller.wait->begun_ns < time_ns && !caller.wait->done();
  });
}

}  // namespace poseidon
