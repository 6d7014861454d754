// Inbox: the receiving half of one end of a shared-memory flow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "base/one_thread.h"
#include "transport/shm/segment.h"

namespace poseidon::shm {

/// The largest payload that is lent to the receiver. Larger payloads are sent in pieces.
inline constexpr std::size_t kLendableBytes = kAreaBytes / 4;

/// Gives blocks back to the sender. Thread-safe. It outlives the flow while something is lent.
class Returns {
 public:
  explicit Returns(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  void give_back(std::uint32_t first_block);

  /// Counts `block_count` blocks as lent. Returns false, and counts nothing, if more than half of the area would be
  /// lent.
  bool lend(std::uint32_t block_count);
  void end_loan(std::uint32_t first_block, std::uint32_t block_count);

 private:
  const std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  std::uint64_t written_ = 0;     // guarded by mutex_
  std::uint32_t lent_count_ = 0;  // in blocks; guarded by mutex_
};

/// Only one thread uses it. It copies what the peer wrote out of the shared memory before it checks it.
class Inbox {
 public:
  explicit Inbox(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  /// Returns the next descriptor, if there is one. The caller must give back or lend its blocks. ErrorCode::mismatch:
  /// no Outbox writes such a descriptor.
  Result<std::optional<Descriptor>> next();

  std::span<const std::byte> data(const Descriptor& descriptor) const;
  void give_back(const Descriptor& descriptor);
  /// Lends the blocks. The caller gives them back by calling the function, or by destroying its last copy; any thread
  /// may do so. Returns an empty function if too much is lent already.
  std::function<void()> lend(const Descriptor& descriptor);

  /// Asks to be woken by the next descriptor. Returns false if there is one already. Before that it wakes a sender that
  /// waits for descriptors to be read, so that the sender goes on when there is room for many.
  bool sleep();

 private:
  Status check(const Descriptor& descriptor) const;

  const std::shared_ptr<Segment> segment_;
  Lane& lane_ = segment_->incoming();
  const std::shared_ptr<Returns> returns_ = std::make_shared<Returns>(segment_);
  std::uint64_t read_ = 0;  // how many descriptors have been read
  [[no_unique_address]] OneThread one_thread_{"Inbox"};
};

}  // namespace poseidon::shm
