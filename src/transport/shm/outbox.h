// Outbox: the sending half of one end of a shared-memory flow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "transport/shm/block_map.h"
#include "transport/shm/segment.h"

namespace poseidon::shm {

/// One thread. What the peer wrote to its counters and returns is checked: nonsense is a mismatch.
class Outbox {
 public:
  struct Place {
    std::uint32_t first_block = 0;
    std::span<std::byte> memory;
  };

  explicit Outbox(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  /// A descriptor and memory for the next piece of a payload, at most `wanted_bytes` (0: none) and at most
  /// the area; fewer only when what is free lies in pieces and the peer may keep the rest for long.
  /// To be filled and published. False when there is nothing now.
  Result<bool> reserve(std::uint64_t wanted_bytes, Place& place);

  /// Sends what the reserved place holds now. `descriptor` says the kind and header.
  void publish(Descriptor& descriptor, const Place& place);

  /// Asks to be woken when the peer has taken or returned something; false when it has since the last
  /// reserve(), which is then worth another try.
  bool wait();

 private:
  Status collect();

  const std::shared_ptr<Segment> segment_;
  Lane& lane_ = segment_->outgoing();
  BlockMap blocks_;
  std::uint64_t written_ = 0;       // descriptors
  std::uint64_t seen_read_ = 0;     // of them, by the peer
  std::uint64_t returns_read_ = 0;  // runs of blocks that came back
};

}  // namespace poseidon::shm
