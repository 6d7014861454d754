// ChunkExchange: one collective call of this rank, chunk by chunk (plan/chunk_roles.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "base/pinned.h"
#include "collective/communicator.h"
#include "plan/chunk_roles.h"
#include "poseidon/collective.h"
#include "scheme/scheme.h"
#include "wire/messages/collective.h"

namespace poseidon {

/// A collective of which this rank has taken its number.
struct NumberedCall {
  CollectiveCall call;
  std::uint64_t number = 0;  // of the communicator's calls, from 1 on
  std::size_t chunk_bytes = 0;
};

/// Only the loop's thread uses it. What it sends reads the call's memory until on_change() has found it done().
class ChunkExchange : private Pinned {
 public:
  /// `on_change` runs on the loop, and not inside a call of this object, when something that was sent has left.
  ChunkExchange(NumberedCall numbered, const Communicator& communicator, const Links& links,
                std::function<void()> on_change);
  ~ChunkExchange();

  void start();
  /// A rank takes all that this one has for it. ErrorCode::mismatch: it makes another call.
  Status ready(std::uint32_t rank, const wire::Ready& told);
  /// ErrorCode::peer_lost: a rank has left before it had all that it should get.
  Status departure() const;
  /// Handle a piece of this call, like SchemeProtocol. Errors end the job.
  Result<std::span<std::byte>> accept(std::uint32_t rank, const wire::Header& header, bool lent);
  void receive(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload);
  /// The call ends without a result. What waits for its receiver is not sent any more.
  void fail();

  /// Whether nothing uses the call's memory any more, and, unless it has failed, all results are here.
  bool done() const { return sends_pending_ == 0 && (failed_ || (unfinished_ == 0 && gone_count_ == 0)); }
  std::uint64_t number() const { return number_; }
  /// Whether something of the rank is missing, or it has gone before it had all that it should get.
  bool lacks(std::uint32_t rank) const;
  /// Such as "all_reduce 7 of 40 bytes (float32, sum)", and "waiting for chunk 3 from rank 2".
  std::string name() const;
  std::string waiting_for() const;

 private:
  struct Part {
    Buffer buffer;
    bool accepted = false;
    bool arrived = false;
  };
  struct ChunkState {
    ChunkRole role;
    std::vector<std::vector<Part>> parts;  // as role.levels
    std::size_t missing_count = 0;         // of the parts
    Buffer combined;                       // what it gives to others, if it has no other memory
    bool given = false;                    // it has combined what it has
    bool result_accepted = false;
    bool has_result = false;
  };
  struct Held {
    wire::Header header;
    std::span<const std::byte> payload;
  };

  std::span<const std::byte> input_of(const ChunkRole& role) const;
  std::span<std::byte> output_of(const ChunkRole& role) const;
  ChunkState* find(std::uint32_t chunk);
  Part* part_of(ChunkState& state, std::uint32_t rank);
  const Part* part_of(const ChunkState& state, std::uint32_t rank) const {
    return const_cast<ChunkExchange*>(this)->part_of(const_cast<ChunkState&>(state), rank);
  }
  bool passes_through(const ChunkState& state) const;
  std::span<std::byte> memory_for(ChunkState& state, std::uint32_t rank, bool is_result);
  Status unexpected(std::uint32_t rank, const std::string& why) const;
  bool is_overwritten(std::size_t input) const;
  void copy_input(std::size_t input);
  void count_bytes();
  void advance(ChunkState& state);
  std::span<const std::byte> combine(ChunkState& state);
  std::span<const std::byte> combine_level(ChunkState& state, std::size_t level, std::span<const std::byte> own);
  void take_result(ChunkState& state, std::span<const std::byte> value);
  void give(std::uint32_t rank, const ChunkState& state, bool is_result, std::span<const std::byte> value);
  void note_gone(std::uint32_t rank);
  void transmit(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload);
  bool is_finished(const ChunkState& state) const;

  CollectiveCall call_;
  const std::uint64_t number_;
  const std::uint32_t signature_;
  const Communicator& communicator_;
  const Links& links_;
  const std::function<void()> on_change_;
  const Priority priority_;
  std::vector<Buffer> own_inputs_;       // copies of those that outputs may be written over before they are sent
  std::vector<ChunkState> chunks_;       // by number
  std::vector<std::size_t> order_;       // of `chunks_`, in which they are begun
  std::vector<std::size_t> bytes_to_;    // by rank
  std::vector<std::size_t> bytes_from_;  // by rank
  std::vector<bool> ready_;
  std::vector<std::deque<Held>> held_;  // by rank, until it is ready
  std::vector<bool> gone_;              // by rank: something could not be sent to it
  std::size_t gone_count_ = 0;
  std::size_t unfinished_ = 0;  // chunks
  std::size_t sends_pending_ = 0;
  bool failed_ = false;
  [[no_unique_address]] OneThread one_thread_{"ChunkExchange"};
};

}  // namespace poseidon
