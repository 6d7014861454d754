// Fiber: code with a stack of its own, which runs when it is told to.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace poseidon::testing {

/// The memory of stacks, for the next fibers.
class Stacks {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;  // most of it is never touched

  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  /// The lowest address. Whoever runs over the end ends the process.
  std::byte* take();
  void give_back(std::byte* stack) { free_.push_back(stack); }

 private:
  std::vector<std::byte*> free_;
};

/// The thread that has made it resumes it. `stacks` outlives it.
class Fiber {
 public:
  Fiber(Stacks& stacks, std::function<void()> body);
  /// The body has returned, or has never begun.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Runs the body until it calls suspend() or returns.
  void resume();
  /// For the body: resume() returns.
  void suspend();
  bool ended() const { return ended_; }

 private:
  static void enter();
  void run();

  Stacks& stacks_;
  std::function<void()> body_;
  std::byte* const stack_;
  bool ended_ = false;
  bool begun_ = false;
  ucontext_t own_{};  // for the first turn, and with sanitizers for all
  ucontext_t resumer_{};
  jmp_buf own_place_{};  // for all others: to switch contexts takes a system call
  jmp_buf resumer_place_{};
  // What the sanitizers know of stacks.
  void* own_fiber_ = nullptr;
  void* resumer_fiber_ = nullptr;
  void* own_fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  std::size_t resumer_stack_bytes_ = 0;
};

}  // namespace poseidon::testing
