// MessageReader: turns a byte stream into messages; large payloads land in the receiver's memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "transport/transport.h"

namespace poseidon::tcp {

/// One thread. Use: destinations, read into them, consume; again.
class MessageReader {
 public:
  MessageReader();

  /// Where the next bytes of the stream go, at most `limit_bytes` (> 0): the rest of a payload's
  /// place, then a buffer for what follows it. Returns how many of the two are used.
  std::size_t destinations(std::size_t limit_bytes, std::span<iovec, 2> out);

  /// `count` bytes are there: calls the receiver for every message that they complete. A header
  /// that does not decode or a receiver's error ends it; nothing may be consumed after an error.
  Status consume(std::size_t count, Flow& flow, Receiver& receiver);

  /// No calls of the receiver from here on, even inside consume: bytes are read and dropped.
  void stop() { stopped_ = true; }

  /// The receiver has not let the next payload come: nothing is to be read until `consume(0)` has asked again.
  bool waiting() const { return waiting_ && !stopped_; }

  /// Bytes that the payload under way still needs; 0 between messages and in headers.
  std::size_t wanted_bytes() const { return in_payload_ && !stopped_ ? payload_.size() - received_bytes_ : 0; }

  /// Messages that have been completed.
  std::uint64_t message_count() const { return message_count_; }

  /// True when the stream may end here without cutting a message.
  bool between_messages() const { return !in_payload_ && end_ == begin_; }

 private:
  Status start_message(Flow& flow, Receiver& receiver);
  Status finish_message(Flow& flow, Receiver& receiver);
  std::size_t buffered_bytes() const { return end_ - begin_; }

  Buffer buffer_;
  std::size_t begin_ = 0;  // buffer_[begin_, end_) is read but not consumed
  std::size_t end_ = 0;
  bool waiting_ = false;
  bool in_payload_ = false;
  wire::Header header_;
  std::span<std::byte> payload_;
  std::size_t received_bytes_ = 0;  // of payload_
  std::uint64_t message_count_ = 0;
  bool stopped_ = false;
};

}  // namespace poseidon::tcp
