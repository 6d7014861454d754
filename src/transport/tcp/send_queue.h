// SendQueue: messages that wait for the socket, in the form that sendmsg takes.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "poseidon/status.h"
#include "transport/coded_payload.h"
#include "transport/coding_choice.h"
#include "transport/level_queue.h"
#include "wire/header.h"

namespace poseidon::tcp {

/// Sends the most urgent message first, but completes a message that has begun. A message whose header has a coding
/// travels coded (transport/coded_payload.h), unless its first values do not shrink. It is coded while it is sent, a
/// few segments at a time. Only one thread uses it.
class SendQueue {
 public:
  using Done = std::function<void(const Status&)>;

  /// `choice` gets to know how long coding takes.
  explicit SendQueue(CodingChoice& choice) : choice_(choice) {}

  /// `is_coded`: the payload is coded already.
  void push(const wire::Header& header, Pieces payload, Done done, bool is_coded = false);
  bool empty() const { return !one_thread_.checked(current_) && waiting_.empty(); }

  /// Describes the next bytes, of several messages if they fit, at most `limit_bytes` in all. Returns how many elements
  /// of `out` it used.
  std::size_t fill(std::span<iovec> out, std::size_t limit_bytes);

  /// Notes that the system took the first `count` bytes of what fill() described. There must be no push between the
  /// two. Appends the `done` of every message that is complete.
  void advance(std::size_t count, std::vector<Done>& finished);

  /// Empties the queue. Returns the `done` of every message.
  std::vector<Done> take_all();

  /// How many more bytes the messages that have been sent would have had if nothing had been coded.
  std::uint64_t saved_bytes() const { return one_thread_.checked(saved_bytes_); }

 private:
  struct Coded {
    wire::Header header;
    CodedPayload payload;
  };
  struct Entry {
    std::array<std::byte, wire::kHeaderBytes> header{};
    Pieces payload;  // no empty pieces
    Done done;
    std::unique_ptr<Coded> coded;   // what is coded while it is sent
    std::uint64_t saved_bytes = 0;  // so far
  };

  std::span<const std::byte> piece_of(const Entry& entry, std::size_t index) const;
  std::size_t piece_count_of(const Entry& entry) const { return entry.coded ? 2 : 1 + entry.payload.size(); }
  void begin_coded();
  std::size_t stage();

  CodingChoice& choice_;
  std::uint64_t saved_bytes_ = 0;
  std::optional<Entry> current_;  // the message that has begun to be sent
  std::size_t piece_ = 0;         // the piece of that message that is sent next
  std::size_t offset_bytes_ = 0;  // in that piece
  LevelQueue<Entry> waiting_;
  std::vector<std::byte> stage_memory_;  // for segments of current_, once a message was coded
  std::span<const std::byte> staged_;    // those that are being sent
  [[no_unique_address]] OneThread one_thread_{"SendQueue"};
};

}  // namespace poseidon::tcp
