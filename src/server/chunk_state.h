// ChunkState: one chunk's contributions in the step that is under way (Poseidon §4.1: the count
// that every KV pair keeps).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon {

/// One worker's message, with its payload: received into `buffer`, or lent by a worker of this
/// process until `release` is called.
struct Contribution {
  wire::Header header;
  Buffer buffer;
  std::span<const std::byte> payload;
  std::function<void()> release;

  bool present() const { return (header.flags & wire::kAbsent) == 0; }
  bool has_factors() const { return present() && header.kind == wire::Kind::factors; }
};

/// Loop thread of its shard only. Steps of one chunk never overlap: no worker pushes step t + 1
/// before it has the result of step t, which takes every worker's push of step t.
class ChunkState {
 public:
  explicit ChunkState(std::uint32_t worker_count) : parts_(worker_count) {}

  /// Takes a contribution. Refuses (ErrorCode::refused, the contribution is handed back untouched)
  /// one that does not fit those already here (another step, size, shape, dtype or divisor, or a
  /// second one from the same rank) or that no shard can compute (an integer divided).
  Status add(Contribution& contribution);

  bool complete() const { return count_ == parts_.size(); }
  bool started() const { return count_ > 0; }
  /// When the first contribution of this step came.
  std::int64_t started_ns() const { return started_ns_; }
  const wire::Header& shape() const { return shape_; }
  std::vector<std::uint32_t> missing_ranks() const;

  /// By rank; only meaningful when complete.
  std::vector<std::optional<Contribution>>& parts() { return parts_; }
  /// Forgets the step's contributions; lent payloads must have been released by the caller.
  void reset();
  /// Takes out one rank's contribution (its connection has ended).
  std::optional<Contribution> remove(std::uint32_t rank);

 private:
  std::vector<std::optional<Contribution>> parts_;
  std::size_t count_ = 0;
  std::int64_t started_ns_ = 0;
  wire::Header shape_;  // of the first contribution; its dense size, rows and cols once they are known
  std::optional<std::size_t> dense_bytes_;  // of those who are present
};

/// Bytes of the dense array that a push or factors message stands for; 0 when it does not say
/// (an absent push). ErrorCode::refused when the payload does not have the size its header says.
Result<std::size_t> dense_bytes(const wire::Header& header);

}  // namespace poseidon
