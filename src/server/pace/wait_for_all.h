// WaitForAll: the steps of a chunk end when every rank's contribution is in (consistency=bsp, stragglers=wait).
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "server/pace/pace.h"

namespace poseidon {

/// Has no state: one serves all chunks. The other paces do the same with those contributions that belong to a step.
class WaitForAll : public ChunkPace {
 public:
  Status admit(PacedChunk& chunk, const wire::Contribution& push, Requester& from) override {
    return chunk.state.admit(push, &from);
  }
  std::span<std::byte> place(PacedChunk& chunk, const wire::Contribution& push, Requester& /*from*/, Buffer buffer,
                             std::shared_ptr<const void> turn) override {
    return chunk.state.place(push.rank, std::move(buffer), std::move(turn));
  }
  void progress(PacedChunk& chunk, const wire::Envelope& push, std::size_t received_bytes) override {
    chunk.state.progress(push.rank, received_bytes);
  }
  void complete(PacedChunk& chunk, const wire::Contribution& push) override {
    chunk.state.complete(push.rank, chunk.state.parts()[push.rank]->payload, nullptr);
    chunk.finish_if_all_here();
  }
  void add(PacedChunk& chunk, const wire::Contribution& push, Requester& /*from*/, std::span<const std::byte> payload,
           std::function<void()> release) override {
    chunk.state.complete(push.rank, payload, std::move(release));
    chunk.finish_if_all_here();
  }
  void step_ended(PacedChunk& /*chunk*/, const wire::Header& /*result*/,
                  const Result<std::shared_ptr<const Buffer>>& /*payload*/) override {}
  void drop(PacedChunk& /*chunk*/, const Requester& /*from*/) override {}
  bool idle() const override { return true; }
  void add_waiting(std::int64_t /*since_before_ns*/, std::vector<OpenChunk>& /*waiting*/) const override {}
};

class WaitingShard final : public ShardPace {
 public:
  WaitingShard() : ShardPace({}) {}
  std::shared_ptr<ChunkPace> chunk_pace(PacedChunk& /*chunk*/) override { return all_; }

 private:
  const std::shared_ptr<WaitForAll> all_ = std::make_shared<WaitForAll>();
};

}  // namespace poseidon
