// SendQueue: messages that wait for the socket, in the form that sendmsg takes.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "poseidon/status.h"
#include "transport/level_queue.h"
#include "wire/header.h"

namespace poseidon::tcp {

/// Sends the most urgent message first, but completes a message that has begun. Only one thread uses it.
class SendQueue {
 public:
  using Done = std::function<void(const Status&)>;

  void push(const wire::Header& header, Pieces payload, Done done);
  bool empty() const { return !one_thread_.checked(current_) && waiting_.empty(); }

  /// Describes the next bytes, of several messages if they fit, at most `limit_bytes` in all. Returns how many elements
  /// of `out` it used.
  std::size_t fill(std::span<iovec> out, std::size_t limit_bytes) const;

  /// Notes that the system took the first `count` bytes of what fill() described. There must be no push between the
  /// two. Appends the `done` of every message that is complete.
  void advance(std::size_t count, std::vector<Done>& finished);

  /// Empties the queue. Returns the `done` of every message.
  std::vector<Done> take_all();

 private:
  struct Entry {
    std::array<std::byte, wire::kHeaderBytes> header{};
    Pieces payload;  // no empty pieces
    Done done;
    std::size_t piece_count() const { return 1 + payload.size(); }
    std::span<const std::byte> piece(std::size_t index) const;
  };

  std::optional<Entry> current_;  // the message that has begun to be sent
  std::size_t piece_ = 0;         // the piece of that message that is sent next
  std::size_t offset_bytes_ = 0;  // in that piece
  LevelQueue<Entry> waiting_;
  [[no_unique_address]] OneThread one_thread_{"SendQueue"};
};

}  // namespace poseidon::tcp
