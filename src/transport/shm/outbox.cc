#include "transport/shm/outbox.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"

namespace poseidon::shm {

Result<bool> Outbox::reserve(std::uint64_t wanted_bytes, Place& place) {
  one_thread_.check();
  if (Status status = collect(); !status.ok()) return status;
  place = {};
  if (written_ - seen_read_ == kDescriptorCount) return false;
  if (wanted_bytes == 0) return true;
  std::uint64_t size_bytes = std::min<std::uint64_t>(wanted_bytes, kAreaBytes);
  auto first = blocks_.take(blocks_for(size_bytes));
  // The peer lends no more than half of the area. While more than that is in use, some of it comes back by itself.
  // Otherwise all of it may be lent for long, so the free blocks must be used as they are, in smaller pieces.
  while (!first && blocks_.used_count() <= kBlockCount / 2) {
    size_bytes = std::uint64_t{blocks_for(size_bytes)} / 2 * kBlockBytes;
    first = blocks_.take(blocks_for(size_bytes));
  }
  if (!first) return false;
  place = {*first, segment_->outgoing_area().subspan(*first * kBlockBytes, size_bytes)};
  return true;
}

void Outbox::publish(Descriptor& descriptor, const Place& place) {
  one_thread_.check();
  invariant(written_ - seen_read_ < kDescriptorCount, "a descriptor is published where reserve() has found room");
  descriptor.first_block = place.first_block;
  descriptor.data_bytes = place.memory.size();
  std::memcpy(&lane_.descriptors[written_ % kDescriptorCount], &descriptor, sizeof(descriptor));
  lane_.descriptors_written.store(++written_);
  segment_->wake_peer(lane_.receiver_asleep);
}

bool Outbox::wait() {
  one_thread_.check();
  lane_.sender_waiting.store(1);
  if (lane_.descriptors_read.load() == seen_read_ && lane_.returns_written.load() == returns_read_) return true;
  lane_.sender_waiting.store(0);
  return false;
}

/// Notes what the peer has read and returned.
Status Outbox::collect() {
  const std::uint64_t read = lane_.descriptors_read.load();
  if (read < seen_read_ || read > written_) {
    return {ErrorCode::mismatch, concat("shared memory: descriptor ", read, " of ", written_, " was read")};
  }
  seen_read_ = read;
  const std::uint64_t returns_written = lane_.returns_written.load();
  if (returns_written - returns_read_ > kBlockCount) {
    return {ErrorCode::mismatch, "shared memory: too many blocks returned"};
  }
  for (; returns_read_ != returns_written; ++returns_read_) {
    const std::uint32_t first = lane_.returns[returns_read_ % kBlockCount].load(std::memory_order_relaxed);
    if (!blocks_.give_back(first)) {
      return {ErrorCode::mismatch, concat("shared memory: block ", first, " returned that was not sent")};
    }
  }
  return {};
}

}  // namespace poseidon::shm
