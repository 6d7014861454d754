// SendQueue: messages that are not yet completely in the shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/invariant.h"
#include "base/one_thread.h"
#include "poseidon/status.h"
#include "transport/level_queue.h"
#include "wire/header.h"

namespace poseidon::shm {

/// Copies the most urgent message first, but completes a message that has begun. Only one thread uses it.
class SendQueue {
 public:
  using Done = std::function<void(const Status&)>;

  /// The pieces of `payload` have header.payload_bytes together.
  void push(const wire::Header& header, Pieces payload, Done done);
  bool empty() const { return !one_thread_.checked(current_) && waiting_.empty(); }

  /// Selects the message to go on with. Messages that are pushed later wait for its end. The queue must not be empty.
  void begin() {
    one_thread_.check();
    if (!current_) current_ = waiting_.pop();
  }
  // The following calls are about the message that begin() selected.
  const wire::Header& header() const {
    one_thread_.check();
    invariant(current_.has_value(), "begin() has selected a message");
    return current_->header;
  }
  std::uint64_t copied_bytes() const { return one_thread_.checked(copied_bytes_); }
  std::uint64_t left_bytes() const { return header().payload_bytes - copied_bytes_; }
  /// Copies the next bytes of the message's payload, as many as `out` holds (at most left_bytes()).
  void copy(std::span<std::byte> out);
  /// Drops the message, all of which has been copied.
  Done pop();

  /// Empties the queue. Returns the `done` of every message.
  std::vector<Done> take_all();

 private:
  struct Entry {
    wire::Header header;
    Pieces payload;
    Done done;
  };

  Done drop();

  LevelQueue<Entry> waiting_;
  std::optional<Entry> current_;
  std::uint64_t copied_bytes_ = 0;  // how much of the message has been copied
  std::size_t piece_ = 0;           // the piece from which the copy goes on
  std::size_t offset_bytes_ = 0;    // the bytes of that piece that have been copied
  [[no_unique_address]] OneThread one_thread_{"SendQueue"};
};

}  // namespace poseidon::shm
