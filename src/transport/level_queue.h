// LevelQueue: values that wait to be sent, the most urgent first.
//
// It is all that the send queues of the transports have in common: TCP describes the next bytes of many encoded
// messages at once, shared memory copies one message piece by piece, and UCX takes whole messages.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/invariant.h"
#include "base/one_thread.h"
#include "wire/header.h"

namespace poseidon {

/// Lower levels come first; within a level it is first in, first out. There is a list for each level, and a bit for
/// each list that is not empty. So every operation takes the same time, however many values wait. Not thread-safe.
template <typename T>
class LevelQueue {
 public:
  LevelQueue() {
    heads_.fill(kNone);
    tails_.fill(kNone);
  }

  bool empty() const { return one_thread_.checked(words_) == 0; }

  /// Appends a value to its level, which must be below wire::kPriorityLevels.
  void push(std::uint16_t level, T value) {
    one_thread_.check();
    invariant(level < wire::kPriorityLevels, "a message's level is below wire::kPriorityLevels");
    const std::uint32_t node = take_node(std::move(value));
    if (heads_[level] == kNone)
      heads_[level] = node;
    else
      nodes_[tails_[level]].next = node;
    tails_[level] = node;
    bits_[level / kWordBits] |= std::uint64_t{1} << level % kWordBits;
    words_ |= std::uint32_t{1} << level / kWordBits;
  }

  /// The value that pop() would return. The queue must not be empty.
  const T& first() const {
    one_thread_.check();
    invariant(words_ != 0, "only a queue that is not empty has a first value");
    return nodes_[heads_[first_level()]].value;
  }

  /// Removes and returns the first value. The queue must not be empty.
  T pop() {
    one_thread_.check();
    invariant(words_ != 0, "a value is taken from a queue that has one");
    const std::size_t level = first_level();
    const std::uint32_t node = heads_[level];
    heads_[level] = nodes_[node].next;
    if (heads_[level] == kNone) {
      tails_[level] = kNone;
      std::uint64_t& bits = bits_[level / kWordBits];  // the first level is the lowest bit of the lowest word
      bits &= bits - 1;
      if (bits == 0) words_ &= words_ - 1;
    }
    T value = std::exchange(nodes_[node].value, T());
    nodes_[node].next = std::exchange(free_, node);
    return value;
  }

  /// Calls `visit` with the values in the order in which they would be popped, as long as it returns true.
  template <typename Visit>
  void visit(const Visit& visit) const {
    one_thread_.check();
    for (std::uint32_t words = words_; words != 0; words &= words - 1) {
      const auto word = static_cast<std::size_t>(std::countr_zero(words));
      for (std::uint64_t bits = bits_[word]; bits != 0; bits &= bits - 1) {
        const std::size_t level = word * kWordBits + static_cast<std::size_t>(std::countr_zero(bits));
        for (std::uint32_t node = heads_[level]; node != kNone; node = nodes_[node].next)
          if (!visit(nodes_[node].value)) return;
      }
    }
  }

 private:
  static constexpr std::size_t kWordBits = 64;
  static constexpr std::size_t kWords = wire::kPriorityLevels / kWordBits;
  static_assert(wire::kPriorityLevels % kWordBits == 0 && kWords <= 32);
  static constexpr std::uint32_t kNone = 0xffffffffu;
  struct Node {
    T value;
    std::uint32_t next = kNone;
  };

  std::size_t first_level() const {
    const auto word = static_cast<std::size_t>(std::countr_zero(words_));
    return word * kWordBits + static_cast<std::size_t>(std::countr_zero(bits_[word]));
  }

  std::uint32_t take_node(T value) {
    if (free_ == kNone) {
      nodes_.push_back({std::move(value), kNone});
      return static_cast<std::uint32_t>(nodes_.size() - 1);
    }
    const std::uint32_t node = free_;
    free_ = nodes_[node].next;
    nodes_[node] = {std::move(value), kNone};
    return node;
  }

  std::vector<Node> nodes_;  // as many as the most values that ever waited at once
  std::uint32_t free_ = kNone;
  std::array<std::uint32_t, wire::kPriorityLevels> heads_{};  // by level; indexes into nodes_
  std::array<std::uint32_t, wire::kPriorityLevels> tails_{};
  std::array<std::uint64_t, kWords> bits_{};  // a bit for each level that is not empty
  std::uint32_t words_ = 0;                   // a bit for each word of bits_ that is not 0
  [[no_unique_address]] OneThread one_thread_{"LevelQueue"};
};

}  // namespace poseidon
