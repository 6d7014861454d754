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

#include "transport/shm/segment.h"

namespace poseidon::shm {

/// The largest payload that is lent; larger ones are sent in pieces.
inline constexpr std::size_t kLendableBytes = kAreaBytes / 4;

/// Gives blocks back to the sender. Thread-safe; outlives the flow while something is lent.
class Returns {
 public:
  explicit Returns(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  void give_back(std::uint32_t first_block);

  /// Counts `block_count` blocks as lent, unless that makes more than half of the area.
  bool lend(std::uint32_t block_count);
  void end_loan(std::uint32_t first_block, std::uint32_t block_count);

 private:
  const std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  std::uint64_t written_ = 0;     // guarded by mutex_
  std::uint32_t lent_count_ = 0;  // blocks; guarded by mutex_
};

/// One thread. What the peer wrote is copied out of the shared memory, then checked.
class Inbox {
 public:
  explicit Inbox(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  /// The next descriptor, if there is one; mismatch when it is none that an Outbox writes. Its blocks are the
  /// caller's to give back or to lend.
  Result<std::optional<Descriptor>> next();

  std::span<const std::byte> data(const Descriptor& descriptor) const;
  void give_back(const Descriptor& descriptor);
  /// Calling the function, or destroying its last copy, gives the blocks back; any thread. Empty: too much is lent.
  std::function<void()> lend(const Descriptor& descriptor);

  /// Asks to be woken by the next descriptor; false when there is one already. Before, wakes a sender that
  /// waits for descriptors to be read: it goes on when there is room for many.
  bool sleep();

 private:
  Status check(const Descriptor& descriptor) const;

  const std::shared_ptr<Segment> segment_;
  Lane& lane_ = segment_->incoming();
  const std::shared_ptr<Returns> returns_ = std::make_shared<Returns>(segment_);
  std::uint64_t read_ = 0;  // descriptors
};

}  // namespace poseidon::shm
