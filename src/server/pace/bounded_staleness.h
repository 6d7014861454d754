// BoundedStaleness: pushes to stored chunks are applied one by one (consistency=ssp, async).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "server/pace/rank_clocks.h"
#include "server/pace/wait_for_all.h"

namespace poseidon {

/// A push updates the chunk's value as soon as it has arrived. Its answer is the value at the time when it is sent. It
/// is sent as soon as the slowest rank is at most `staleness` steps behind, or at once if there is no bound. A chunk
/// that nobody has pushed as a stored one has steps like any other.
class BoundedStaleness final : public WaitForAll {
 public:
  BoundedStaleness(std::uint32_t worker_count, std::optional<std::uint32_t> staleness, std::shared_ptr<BufferPool> pool)
      : worker_count_(worker_count), pool_(std::move(pool)), clocks_(worker_count, staleness) {}

  Status admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) override;
  std::span<std::byte> place(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
                             std::shared_ptr<const void> turn) override;
  void progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) override;
  void complete(PacedChunk& chunk, const wire::Contribution& push) override;
  void add(PacedChunk& chunk, const wire::Contribution& push, Requester& from, std::span<const std::byte> payload,
           std::function<void()> release) override;
  void drop(PacedChunk& chunk, const Requester& from) override;
  bool idle() const override { return clocks_.idle(); }
  void add_waiting(std::int64_t since_before_ns, std::vector<OpenChunk>& waiting) const override;

 private:
  void finish(PacedChunk& chunk, const wire::Contribution& push, Requester& from, Buffer buffer,
              std::span<const std::byte> payload);
  Status apply(PacedChunk& chunk, const wire::Contribution& push, Buffer buffer, std::span<const std::byte> payload);
  void answer_released(PacedChunk& chunk);

  const std::uint32_t worker_count_;
  const std::shared_ptr<BufferPool> pool_;
  RankClocks clocks_;
  bool applies_each_push_ = false;  // true after the first push to the chunk as a stored one
};

class StaleShard final : public ShardPace {
 public:
  StaleShard(const wire::Pace& pace, PaceSurroundings surroundings);
  std::shared_ptr<ChunkPace> chunk_pace(PacedChunk& chunk) override;

 private:
  const std::optional<std::uint32_t> staleness_;
  const PaceSurroundings surroundings_;
};

}  // namespace poseidon
