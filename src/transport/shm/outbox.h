// Outbox: the sending half of one end of a shared-memory flow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/one_thread.h"
#include "transport/shm/block_map.h"
#include "transport/shm/segment.h"

namespace poseidon::shm {

/// Only one thread uses it. It checks what the peer wrote to its counters and to the returned blocks. Impossible values
/// are ErrorCode::mismatch.
class Outbox {
 public:
  struct Place {
    std::uint32_t first_block = 0;
    std::span<std::byte> memory;
  };

  explicit Outbox(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  /// Reserves a descriptor and memory for the next piece of a payload: at most `wanted_bytes` (0: no memory) and at
  /// most the area. It reserves less only if the free blocks are not adjacent and the peer may keep the rest for long.
  /// The caller must fill the memory and publish it. Returns false if there is no room now.
  Result<bool> reserve(std::uint64_t wanted_bytes, Place& place);

  /// Sends what the reserved place holds now. `descriptor` gives the kind and the header.
  void publish(Descriptor& descriptor, const Place& place);

  /// Asks to be woken when the peer has taken or returned something. Returns false if the peer has done so since the
  /// last reserve(), which is then worth another try.
  bool wait();

 private:
  Status collect();

  const std::shared_ptr<Segment> segment_;
  Lane& lane_ = segment_->outgoing();
  BlockMap blocks_;
  std::uint64_t written_ = 0;       // how many descriptors were written
  std::uint64_t seen_read_ = 0;     // how many of them the peer has read
  std::uint64_t returns_read_ = 0;  // how many runs of blocks came back
  [[no_unique_address]] OneThread one_thread_{"Outbox"};
};

}  // namespace poseidon::shm
