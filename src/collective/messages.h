// Messages: what one rank of a communicator sends to another one, which takes it by a call of its own.
//
// A small message comes unasked, and waits here until it is taken. Of a large one comes its first piece without values;
// the rest follows when the receiver has memory for it. Messages of one rank with one tag are taken in the order in
// which they were sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "base/pinned.h"
#include "collective/communicator.h"
#include "poseidon/collective.h"
#include "scheme/scheme.h"
#include "wire/messages/collective.h"

namespace poseidon {

/// What came of a send or a receive.
struct MessageEnd {
  std::uint64_t task = 0;
  std::uint32_t source = 0;  // the sender's rank in the communicator
};

/// Those of one communicator. Only the loop's thread uses it. What is sent and received uses the caller's memory until
/// `on_end` has run for its task, which may be inside the call that starts it.
class Messages : private Pinned {
 public:
  Messages(const Communicator& communicator, const Links& links, std::function<void(MessageEnd)> on_end)
      : communicator_(communicator), links_(links), on_end_(std::move(on_end)) {}
  ~Messages();

  /// ErrorCode::peer_lost: that rank has left.
  Status send(std::uint64_t task, std::uint32_t to, MessageKind kind, std::span<const std::byte> data);
  /// From `from`, or kAnySource. ErrorCode::mismatch: a message that has come is of another size.
  Status receive(std::uint64_t task, std::uint32_t from, MessageKind kind, std::span<std::byte> memory);

  /// `rank` takes the rest of a message that this rank has begun to send to it.
  Status ready(std::uint32_t rank, std::uint64_t number);
  /// Handle a piece, like SchemeProtocol. Errors end the job.
  Result<std::span<std::byte>> accept(std::uint32_t rank, const wire::Header& header, bool lent);
  Status take(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload);
  /// All calls end without a result, those whose memory is being sent as soon as it is free.
  void fail();

  /// Whether this task is a call that is under way.
  bool runs(std::uint64_t task) const {
    return sending_.contains(task) ||
           std::ranges::any_of(receiving_, [task](const Receiving& call) { return call.task == task; });
  }
  /// Whether a call waits for the rank.
  bool lacks(std::uint32_t rank) const;
  /// Such as "waiting for a message with tag 3 from rank 2"; empty if nothing is awaited.
  std::string waiting_for() const;

 private:
  struct Sending {
    std::uint64_t task = 0;
    std::uint32_t to = 0;
    std::uint64_t number = 0;
    MessageKind kind;
    std::span<const std::byte> rest;  // not sent yet, because the receiver is not ready
    std::size_t pending_count = 0;    // pieces that still read the memory
    bool gone = false;                // something could not be sent
  };
  struct Receiving {
    std::uint64_t task = 0;
    std::uint32_t from = 0;
    MessageKind kind;
    std::span<std::byte> memory;
    std::optional<std::pair<std::uint32_t, std::uint64_t>> message;  // sender and number, once it has begun to come
    std::size_t accepted_bytes = 0;
    std::size_t arrived_bytes = 0;
  };
  /// A message for which there is no call yet.
  struct Waiting {
    std::uint32_t rank = 0;
    std::uint64_t number = 0;
    MessageKind kind;
    std::size_t total_bytes = 0;
    Buffer buffer;          // all of a small message
    bool arrived = false;   // its first piece is complete
    bool has_call = false;  // which took it before its first piece was complete
  };

  static bool fits(const Receiving& call, std::uint32_t rank, std::uint32_t tag) {
    return !call.message && call.kind.tag == tag && (call.from == kAnySource || call.from == rank);
  }
  Status bind(Receiving& call, std::uint32_t rank, std::uint64_t number, std::size_t total_bytes, std::uint32_t label);
  Receiving* bound(std::uint32_t rank, std::uint64_t number);
  void take_whole(Receiving& call, std::span<const std::byte> payload);
  void ask_for_rest(const Receiving& call);
  void end(const Receiving& call);
  void send_piece(Sending& sending, std::size_t offset_bytes, std::size_t total_bytes,
                  std::span<const std::byte> piece);
  bool is_last(std::uint32_t rank) const;
  void end_if_sent(std::uint64_t task);
  wire::Envelope about(std::uint64_t number) const;
  std::string name_of(std::uint32_t rank) const;

  const Communicator& communicator_;
  const Links& links_;
  const std::function<void(MessageEnd)> on_end_;
  std::map<std::uint32_t, std::uint64_t> sent_;  // by receiver: how many messages
  std::map<std::uint64_t, Sending> sending_;     // by task
  std::list<Receiving> receiving_;               // in the order of the calls
  std::list<Waiting> waiting_;                   // in the order of arrival
  std::size_t waiting_bytes_ = 0;
  bool failed_ = false;
  [[no_unique_address]] OneThread one_thread_{"Messages"};
};

}  // namespace poseidon
