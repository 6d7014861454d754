// IncomingParts: contributions to one chunk that are being received and belong to no sum of a step.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/invariant.h"
#include "base/one_thread.h"
#include "server/chunk/requester.h"

namespace poseidon {

/// It holds at most one part of each rank. Only the loop thread of its shard uses it.
class IncomingParts {
 public:
  struct Part {
    Requester* from = nullptr;
    Buffer buffer;
  };

  bool empty() const { return one_thread_.checked(parts_).empty(); }
  bool has(std::uint32_t rank) const { return one_thread_.checked(parts_).contains(rank); }
  /// Returns the memory for the rank's payload, which is `buffer`.
  std::span<std::byte> place(std::uint32_t rank, Requester* from, Buffer buffer) {
    one_thread_.check();
    const auto [part, fresh] = parts_.try_emplace(rank, Part{from, std::move(buffer)});
    invariant(fresh, "no other part of the rank is being received");
    return part->second.buffer.span();
  }
  /// Takes a part that is complete. The rank must have one.
  Part take(std::uint32_t rank) {
    one_thread_.check();
    auto part = parts_.extract(rank);
    invariant(!part.empty(), "a part completes once, after it has begun");
    return std::move(part.mapped());
  }
  /// Drops the parts of a requester that has left.
  void drop(const Requester* from, BufferPool& pool) {
    one_thread_.check();
    for (auto part = parts_.begin(); part != parts_.end();) {
      const auto next = std::next(part);
      if (part->second.from == from) pool.give_back(std::move(parts_.extract(part).mapped().buffer));
      part = next;
    }
  }

 private:
  std::map<std::uint32_t, Part> parts_;  // by rank
  [[no_unique_address]] OneThread one_thread_{"IncomingParts"};
};

}  // namespace poseidon
