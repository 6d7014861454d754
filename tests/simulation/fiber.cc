#include "simulation/fiber.h"

#include <sys/mman.h>

#include <utility>

#include "base/invariant.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace poseidon::testing {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kJumps = false;  // they do not know a jump to another stack
#else
constexpr bool kJumps = true;
#endif
constexpr std::size_t kGuardBytes = 4096;

thread_local Fiber* entering = nullptr;

/// Tells the address sanitizer that the stack changes. `left` gets the fake frames of the stack that is left; null:
/// that stack has ended.
void begin_switch([[maybe_unused]] void** left, [[maybe_unused]] const void* stack,
                  [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(left, stack, bytes);
#endif
}

void end_switch([[maybe_unused]] void* entered, [[maybe_unused]] const void** from,
                [[maybe_unused]] std::size_t* from_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(entered, from, from_bytes);
#endif
}

}  // namespace

Stacks::~Stacks() {
  for (std::byte* stack : free_) ::munmap(stack - kGuardBytes, kBytes + kGuardBytes);
}

std::byte* Stacks::take() {
  if (!free_.empty()) {
    std::byte* const stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void* const mapped = ::mmap(nullptr, kBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  invariant(mapped != MAP_FAILED, "there is memory for a fiber's stack");
  invariant(::mprotect(mapped, kGuardBytes, PROT_NONE) == 0, "a fiber's stack has a guard");
  return static_cast<std::byte*>(mapped) + kGuardBytes;
}

Fiber::Fiber(Stacks& stacks, std::function<void()> body)
    : stacks_(stacks), body_(std::move(body)), stack_(stacks.take()) {
  invariant(::getcontext(&own_) == 0, "a context is read");
  own_.uc_stack.ss_sp = stack_;
  own_.uc_stack.ss_size = Stacks::kBytes;
  own_.uc_link = nullptr;
  ::makecontext(&own_, &Fiber::enter, 0);
#if defined(__SANITIZE_THREAD__)
  own_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(own_fiber_);
#endif
  stacks_.give_back(stack_);
}

void Fiber::resume() {
  entering = this;
#if defined(__SANITIZE_THREAD__)
  resumer_fiber_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(own_fiber_, 0);
#endif
  begin_switch(&resumer_fake_stack_, stack_, Stacks::kBytes);
  if (!kJumps) {
    ::swapcontext(&resumer_, &own_);
  } else if (_setjmp(resumer_place_) == 0) {
    if (begun_) _longjmp(own_place_, 1);
    begun_ = true;
    ::setcontext(&own_);
  }
  end_switch(resumer_fake_stack_, nullptr, nullptr);
}

void Fiber::suspend() {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(resumer_fiber_, 0);
#endif
  begin_switch(ended_ ? nullptr : &own_fake_stack_, resumer_stack_, resumer_stack_bytes_);
  if (!kJumps) {
    ::swapcontext(&own_, &resumer_);
  } else if (_setjmp(own_place_) == 0) {
    _longjmp(resumer_place_, 1);
  }
  end_switch(own_fake_stack_, &resumer_stack_, &resumer_stack_bytes_);
}

void Fiber::enter() { entering->run(); }

void Fiber::run() {
  end_switch(nullptr, &resumer_stack_, &resumer_stack_bytes_);
  std::exchange(body_, nullptr)();
  ended_ = true;
  suspend();  // for ever
}

}  // namespace poseidon::testing
