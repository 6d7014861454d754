// SendQueue: messages that are not yet wholly in the shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "poseidon/status.h"
#include "transport/level_queue.h"
#include "wire/header.h"

namespace poseidon::shm {

/// The most urgent message first, but one that has begun to be copied is completed. One thread.
class SendQueue {
 public:
  using Done = std::function<void(const Status&)>;

  /// The pieces of `payload` are header.payload_bytes together.
  void push(const wire::Header& header, std::vector<std::span<const std::byte>> payload, Done done);
  bool empty() const { return !current_ && waiting_.empty(); }

  /// The message to go on with; what is pushed later waits for its end. Not when empty.
  void begin() {
    if (!current_) current_ = waiting_.pop();
  }
  // Of that message, after begin():
  const wire::Header& header() const { return current_->header; }
  std::uint64_t copied_bytes() const { return copied_bytes_; }
  std::uint64_t left_bytes() const { return header().payload_bytes - copied_bytes_; }
  /// Copies the next bytes of its payload, as many as `out` holds (at most left_bytes()).
  void copy(std::span<std::byte> out);
  /// All of it is copied: drops it.
  Done pop();

  /// Empties the queue.
  std::vector<Done> take_all();

 private:
  struct Entry {
    wire::Header header;
    std::vector<std::span<const std::byte>> payload;
    Done done;
  };

  LevelQueue<Entry> waiting_;
  std::optional<Entry> current_;
  std::uint64_t copied_bytes_ = 0;  // of it
  std::size_t piece_ = 0;           // where its copy goes on: in this piece
  std::size_t offset_bytes_ = 0;    // after these bytes
};

}  // namespace poseidon::shm
