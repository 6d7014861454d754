#include "base/world.h"

#include <utility>

namespace poseidon {

namespace {

thread_local World* entered = nullptr;

}  // namespace

World* World::of_this_thread() noexcept { return entered; }

World::Entered::Entered(World& world) : outer_(std::exchange(entered, &world)) {
  simulated_count_.fetch_add(1, std::memory_order_relaxed);
}

World::Entered::~Entered() {
  simulated_count_.fetch_sub(1, std::memory_order_relaxed);
  entered = outer_;
}

}  // namespace poseidon
