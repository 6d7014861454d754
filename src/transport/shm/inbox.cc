#include "transport/shm/inbox.h"

#include <cstring>

#include "base/invariant.h"
#include "transport/loan.h"

namespace poseidon::shm {

void Returns::give_back(std::uint32_t first_block) {
  Lane& lane = segment_->incoming();
  {
    const std::lock_guard lock(mutex_);
    lane.returns[written_ % kBlockCount].store(first_block, std::memory_order_relaxed);
    lane.returns_written.store(++written_);
  }
  segment_->wake_peer(lane.sender_waiting);
}

bool Returns::lend(std::uint32_t block_count) {
  const std::lock_guard lock(mutex_);
  if (lent_count_ + block_count > kBlockCount / 2) return false;
  lent_count_ += block_count;
  return true;
}

void Returns::end_loan(std::uint32_t first_block, std::uint32_t block_count) {
  {
    const std::lock_guard lock(mutex_);
    invariant(block_count <= lent_count_, "a loan ends once");
    lent_count_ -= block_count;
  }
  give_back(first_block);
}

Result<std::optional<Descriptor>> Inbox::next() {
  one_thread_.check();
  const std::uint64_t written = lane_.descriptors_written.load();
  if (written == read_) return std::optional<Descriptor>();
  if (written - read_ > kDescriptorCount) {
    return Status(ErrorCode::mismatch, concat("shared memory: ", written - read_, " descriptors at once"));
  }
  Descriptor descriptor;
  std::memcpy(&descriptor, &lane_.descriptors[read_ % kDescriptorCount], sizeof(descriptor));
  // Keeps the compiler from reading the shared memory again for what has been checked.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (Status status = check(descriptor); !status.ok()) return status;
  lane_.descriptors_read.store(++read_);
  return std::optional(descriptor);
}

Status Inbox::check(const Descriptor& descriptor) const {
  if (descriptor.kind != Descriptor::Kind::message && descriptor.kind != Descriptor::Kind::piece) {
    return {ErrorCode::mismatch, "shared memory: a descriptor of unknown kind"};
  }
  if (descriptor.data_bytes > kAreaBytes || descriptor.first_block >= kBlockCount ||
      blocks_for(descriptor.data_bytes) > kBlockCount - descriptor.first_block) {
    return {ErrorCode::mismatch,
            concat("shared memory: ", descriptor.data_bytes, " bytes from block ", descriptor.first_block, " on")};
  }
  return {};
}

std::span<const std::byte> Inbox::data(const Descriptor& descriptor) const {
  one_thread_.check();
  invariant(check(descriptor).ok(), "data is read of descriptors that next() has checked");
  return segment_->incoming_area().subspan(descriptor.first_block * kBlockBytes, descriptor.data_bytes);
}

void Inbox::give_back(const Descriptor& descriptor) {
  one_thread_.check();
  if (descriptor.data_bytes > 0) returns_->give_back(descriptor.first_block);
}

std::function<void()> Inbox::lend(const Descriptor& descriptor) {
  one_thread_.check();
  const std::uint32_t block_count = blocks_for(descriptor.data_bytes);
  if (!returns_->lend(block_count)) return {};
  return make_loan([returns = returns_, first_block = descriptor.first_block, block_count] {
    returns->end_loan(first_block, block_count);
  });
}

bool Inbox::sleep() {
  one_thread_.check();
  segment_->wake_peer(lane_.sender_waiting);
  lane_.receiver_asleep.store(1);
  if (lane_.descriptors_written.load() == read_) return true;
  lane_.receiver_asleep.store(0);
  return false;
}

}  // namespace poseidon::shm
