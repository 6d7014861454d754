// MessageReader: turns a byte stream into messages. Large payloads are read directly into the receiver's memory, unless
// they are coded: then each segment is decoded there.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/one_thread.h"
#include "transport/coded_payload.h"
#include "transport/coding_choice.h"
#include "transport/transport.h"

namespace poseidon::tcp {

/// Only one thread uses it. Call `destinations`, read into them, call `consume`, and repeat.
class MessageReader {
 public:
  /// `choice` gets to know how long decoding takes.
  explicit MessageReader(CodingChoice& choice);

  /// Gives the places for the next bytes of the stream, at most `limit_bytes` (> 0): first the rest of a payload's
  /// memory, then a buffer for what follows it. Returns how many of the two places are used.
  std::size_t destinations(std::size_t limit_bytes, std::span<iovec, 2> out);

  /// Takes `count` bytes that have been read, and calls the receiver for every message that they complete. A header
  /// that does not decode, or an error of the receiver, ends the stream. Do not call it again after an error.
  Status consume(std::size_t count, Flow& flow, Receiver& receiver);

  /// Stops all calls of the receiver, even inside `consume`. From then on bytes are read and dropped.
  void stop() { one_thread_.checked(stopped_) = true; }

  /// Whether the receiver does not accept the next payload yet. Nothing may be read until `consume(0)` has asked again.
  bool waiting() const { return one_thread_.checked(waiting_) && !stopped_; }

  /// How many bytes the current payload, or its current segment if it is coded, still needs. 0 between messages and in
  /// headers.
  std::size_t wanted_bytes() const;

  /// Whether the peer would rather receive values as they are, by the last header.
  bool peer_prefers_plain() const { return one_thread_.checked(peer_prefers_plain_); }

  /// How many more bytes would have come if nothing had been coded.
  std::uint64_t saved_bytes() const { return one_thread_.checked(saved_bytes_); }

  /// How many messages have been completed.
  std::uint64_t message_count() const { return one_thread_.checked(message_count_); }

  /// Whether a payload has come in part.
  bool in_payload() const { return one_thread_.checked(in_payload_); }

  /// Whether the stream may end here without cutting a message.
  bool between_messages() const { return !one_thread_.checked(in_payload_) && end_ == begin_; }

 private:
  Status start_message(Flow& flow, Receiver& receiver);
  Status finish_message(Flow& flow, Receiver& receiver);
  Status decode_segments(const Flow& flow);
  bool is_coded() const { return in_payload_ && coding_ != Coding::none; }
  std::size_t segment_plain_bytes() const { return std::min(payload_.size() - received_bytes_, kSegmentBytes); }
  std::size_t buffered_bytes() const { return end_ - begin_; }

  CodingChoice& choice_;
  Buffer buffer_;
  std::size_t begin_ = 0;  // buffer_[begin_, end_) is read but not consumed
  std::size_t end_ = 0;
  bool waiting_ = false;
  bool in_payload_ = false;
  wire::Header header_;
  std::span<std::byte> payload_;
  std::size_t received_bytes_ = 0;  // of payload_
  Coding coding_ = Coding::none;    // as what the payload travels
  bool peer_prefers_plain_ = false;
  std::uint64_t saved_bytes_ = 0;
  std::uint64_t message_count_ = 0;
  bool stopped_ = false;
  [[no_unique_address]] OneThread one_thread_{"MessageReader"};
};

}  // namespace poseidon::tcp
