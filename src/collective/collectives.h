// Collectives: the calls of a client's communicators that are under way, and what has come before its call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "base/pinned.h"
#include "collective/chunk_exchange.h"
#include "collective/communicator.h"
#include "collective/messages.h"
#include "poseidon/collective.h"
#include "scheme/scheme.h"
#include "transport/addressee.h"

namespace poseidon {

/// Only the loop's thread uses it. All peers of a communicator must be connected before a call of it begins.
class Collectives final : public Addressee, private Pinned {
 public:
  /// A task has ended: nothing uses its memory any more. `source` is the sender's rank, for receive().
  using OnEnd = std::function<void(std::uint64_t task, std::uint32_t source)>;

  Collectives(const Links& links, std::size_t chunk_bytes, OnEnd on_end)
      : links_(links), chunk_bytes_(chunk_bytes), on_end_(std::move(on_end)) {}
  ~Collectives();

  /// `id` is new in this client, and the same on all its ranks.
  Status add(Communicator communicator);

  // Begin a call. An error ends the job, here as above.
  Status start(std::uint32_t communicator, CollectiveCall call, std::uint64_t task);
  Status send(std::uint32_t communicator, std::uint32_t to, MessageKind kind, std::span<const std::byte> data,
              std::uint64_t task);
  Status receive(std::uint32_t communicator, std::uint32_t from, MessageKind kind, std::span<std::byte> memory,
                 std::uint64_t task);

  /// Handle a piece, and a ready message, which come from the rank of the header. Errors end the job.
  Result<std::span<std::byte>> accept(const wire::Header& header, bool lent) override;
  Status on_message(const wire::Header& header, std::span<const std::byte> payload) override;
  Status on_ready(const wire::Header& header);

  /// Ends all calls without results, as soon as their memory is free. None begins after this.
  void fail();

  /// Whether this task is a call that is under way.
  bool runs(std::uint64_t task) const;
  /// Whether a call waits for this rank of the client.
  bool lacks(std::uint32_t peer) const;
  /// What the oldest call waits for; empty if none is under way.
  std::string waiting_for() const;

 private:
  using CallKey = std::pair<std::uint32_t, std::uint64_t>;  // of a communicator, its number
  static constexpr std::uint64_t kMessages = 0;             // instead of a number: messages from rank to rank
  struct Running {
    std::unique_ptr<ChunkExchange> exchange;
    std::uint64_t task = 0;
  };
  /// What has come of a call that this rank has not begun.
  struct Early {
    wire::Header header;
    Buffer buffer;
    bool arrived = false;
  };
  struct Entry {
    Communicator communicator;
    std::unique_ptr<Messages> messages;
  };

  Entry* entry_of(const wire::Header& header);
  std::uint32_t rank_in(const Communicator& communicator, std::uint32_t peer) const;
  Result<std::span<std::byte>> keep(const wire::Header& header, const CallKey& key);
  Early* early_piece(const CallKey& key, const wire::Header& header);
  Status deliver_message(const wire::Header& header, std::span<const std::byte> payload);
  Status replay(const CallKey& key);
  Status inside(const CallKey& key, const std::function<Status(ChunkExchange&)>& work);
  Status deliver(const CallKey& key, const wire::Header& header, std::span<const std::byte> payload);
  void settle(const CallKey& key);
  Status unknown(const wire::Header& header) const;
  Status ended(const wire::Header& header) const;

  const Links& links_;
  const std::size_t chunk_bytes_;
  const OnEnd on_end_;
  std::map<std::uint32_t, Entry> communicators_;  // by id
  std::map<CallKey, Running> running_;
  std::map<CallKey, std::list<Early>> early_;
  std::size_t early_bytes_ = 0;
  std::optional<CallKey> inside_;  // the call whose exchange is being called
  bool failed_ = false;
  [[no_unique_address]] OneThread one_thread_{"Collectives"};
};

}  // namespace poseidon
