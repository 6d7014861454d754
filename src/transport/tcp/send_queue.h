// SendQueue: messages that wait for the socket, as the vectors that sendmsg wants.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "poseidon/status.h"
#include "transport/level_queue.h"
#include "wire/header.h"

namespace poseidon::tcp {

/// The most urgent message first, but one that has begun to be sent is completed. One thread.
class SendQueue {
 public:
  using Done = std::function<void(const Status&)>;

  void push(const wire::Header& header, std::vector<std::span<const std::byte>> payload, Done done);
  bool empty() const { return !current_ && waiting_.empty(); }

  /// Describes the next bytes, over several messages if they fit, at most `limit_bytes` in all.
  /// Returns how many elements of `out` are used.
  std::size_t fill(std::span<iovec> out, std::size_t limit_bytes) const;

  /// The first `count` bytes of what fill() described, with no push in between, were taken; appends the `done` of
  /// every message that is complete.
  void advance(std::size_t count, std::vector<Done>& finished);

  /// Empties the queue.
  std::vector<Done> take_all();

 private:
  struct Entry {
    std::array<std::byte, wire::kHeaderBytes> header{};
    std::vector<std::span<const std::byte>> payload;  // no empty pieces
    Done done;
    std::size_t piece_count() const { return 1 + payload.size(); }
    std::span<const std::byte> piece(std::size_t index) const;
  };

  std::optional<Entry> current_;  // has begun to be sent
  std::size_t piece_ = 0;         // of it: the piece that goes on
  std::size_t offset_bytes_ = 0;  // in that piece
  LevelQueue<Entry> waiting_;
};

}  // namespace poseidon::tcp
