// Segment: the memory that the two ends of a shared-memory flow share, and how they wake each other.
//
// Each direction has a lane and an area. The sender copies a payload to free blocks of the area and says so in a
// descriptor. Only the sender decides which blocks it uses. The receiver returns blocks in any order. So a payload that
// the receiver keeps for long holds up only its own blocks, and the blocks in use stay few and in the cache.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/file_descriptor.h"
#include "base/pinned.h"
#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon::shm {

// An area has 4 MiB per direction, of which half can be lent. Larger areas leave the caches: with both ends sending, 8
// MiB took about a fifth more CPU time per byte, and 16 MiB about half more. 2 MiB copied up to a tenth faster on
// average. But it lends half as much, and what cannot be lent is copied once more.
inline constexpr std::size_t kBlockBytes = 16u << 10;
inline constexpr std::uint32_t kBlockCount = 256;
inline constexpr std::size_t kAreaBytes = kBlockBytes * kBlockCount;
inline constexpr std::uint32_t kDescriptorCount = 256;

inline std::uint32_t blocks_for(std::uint64_t size_bytes) {
  return static_cast<std::uint32_t>((size_bytes + kBlockBytes - 1) / kBlockBytes);
}

/// A message, or the next piece of a message's payload.
struct Descriptor {
  enum class Kind : std::uint32_t { message = 1, piece = 2 };

  std::array<std::byte, wire::kHeaderBytes> header{};  // for a message only
  Kind kind = Kind::message;
  std::uint32_t first_block = 0;
  std::uint64_t data_bytes = 0;  // the part of the payload that begins at first_block; 0: no blocks
  std::array<std::byte, 48> unused{};
};
static_assert(sizeof(Descriptor) == 128);

/// One direction. Counters only grow. Each side writes its own counters and checks the other's before use.
struct Lane {
  alignas(64) std::atomic<std::uint64_t> descriptors_written;  // written by the sender
  alignas(64) std::atomic<std::uint64_t> descriptors_read;     // written by the receiver
  alignas(64) std::atomic<std::uint64_t> returns_written;      // written by the receiver
  // A flag that is not 0 means: that side has found nothing to do and wants to be woken. It sets the flag, then looks
  // once more. The other side writes its counter, then looks at the flag. Both are sequentially consistent, so one of
  // them sees the other.
  alignas(64) std::atomic<std::uint32_t> receiver_asleep;
  alignas(64) std::atomic<std::uint32_t> sender_waiting;
  alignas(64) std::array<Descriptor, kDescriptorCount> descriptors;
  // The first blocks of the runs that are free again. The array has an entry for each block, so it cannot overflow.
  std::array<std::atomic<std::uint32_t>, kBlockCount> returns;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// What one end of a flow sends to the other over their socket.
struct SegmentFiles {
  FileDescriptor memory;
  FileDescriptor connector_wake;  // the two wake files are eventfds
  FileDescriptor acceptor_wake;
};

/// Immutable, except for the memory that it maps. Thread-safe. It lives until the flow and all loans have released it.
class Segment : private Pinned {
 public:
  /// Creates the files at the end that connects. Both ends map them.
  static Result<SegmentFiles> make_files();
  /// ErrorCode::mismatch: `files`, which come from another process, are not what make_files creates.
  static Result<std::shared_ptr<Segment>> open(SegmentFiles files, bool connector);

  Segment(SegmentFiles files, std::byte* memory, bool connector);
  ~Segment();

  Lane& outgoing() const { return *lane(connector_ ? 0 : 1); }
  Lane& incoming() const { return *lane(connector_ ? 1 : 0); }
  std::span<std::byte> outgoing_area() const { return area(connector_ ? 0 : 1); }
  std::span<std::byte> incoming_area() const { return area(connector_ ? 1 : 0); }

  int own_wake() const { return (connector_ ? files_.connector_wake : files_.acceptor_wake).get(); }
  /// Writes to the other side's eventfd if `asleep` is set, and clears the flag.
  void wake_peer(std::atomic<std::uint32_t>& asleep) const;

 private:
  Lane* lane(std::size_t index) const;
  std::span<std::byte> area(std::size_t index) const;

  const SegmentFiles files_;
  std::byte* const memory_;
  const bool connector_;
};

}  // namespace poseidon::shm
