#include "transport/tcp/message_reader.h"

#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/invariant.h"
#include "transport/flow_end.h"

namespace poseidon::tcp {

namespace {
constexpr std::size_t kBufferBytes = 64u << 10;
static_assert(kBufferBytes >= kMostSegmentBytes);
}  // namespace

MessageReader::MessageReader(CodingChoice& choice) : choice_(choice), buffer_(kBufferBytes) {}

std::size_t MessageReader::destinations(std::size_t limit_bytes, std::span<iovec, 2> out) {
  one_thread_.check();
  invariant(limit_bytes > 0, "somebody who reads takes at least a byte");
  if (stopped_) begin_ = end_ = 0;
  if (!in_payload_ || is_coded() || stopped_) {
    // At most a part of one header or segment is left.
    std::memmove(buffer_.data(), buffer_.data() + begin_, buffered_bytes());
    end_ -= begin_;
    begin_ = 0;
    out[0] = {buffer_.data() + end_, std::min(buffer_.size() - end_, limit_bytes)};
    return 1;
  }
  const auto rest = payload_.subspan(received_bytes_);
  out[0] = {rest.data(), std::min(rest.size(), limit_bytes)};
  if (rest.size() >= limit_bytes) return 1;
  out[1] = {buffer_.data(), std::min(buffer_.size(), limit_bytes - rest.size())};
  return 2;
}

Status MessageReader::consume(std::size_t count, Flow& flow, Receiver& receiver) {
  one_thread_.check();
  if (stopped_) return {};
  if (in_payload_ && !is_coded()) {
    const std::size_t in_place = std::min(count, payload_.size() - received_bytes_);
    received_bytes_ += in_place;
    end_ = count - in_place;
  } else {
    end_ += count;
  }
  invariant(end_ <= buffer_.size(), "no more bytes are read than there were places for");
  while (!stopped_) {
    if (!in_payload_) {
      if (buffered_bytes() < wire::kHeaderBytes) break;
      if (Status status = start_message(flow, receiver); !status.ok()) return status;
      if (stopped_ || waiting_) break;
    }
    if (is_coded())
      if (Status status = decode_segments(flow); !status.ok()) return status;
    if (received_bytes_ < payload_.size()) break;
    if (Status status = finish_message(flow, receiver); !status.ok()) return status;
  }
  if (begin_ == end_) begin_ = end_ = 0;
  if (in_payload_ && received_bytes_ > 0) receiver.on_progress(flow, header_, received_bytes_);
  return {};
}

Status MessageReader::start_message(Flow& flow, Receiver& receiver) {
  const auto bytes = std::span<const std::byte>(buffer_.span()).subspan(begin_).first<wire::kHeaderBytes>();
  if (Status status = wire::decode(bytes, header_); !status.ok())
    return status.with_context("message from " + flow.peer_name());
  // Receivers see the values.
  coding_ = std::exchange(header_.coding, Coding::none);
  peer_prefers_plain_ = std::exchange(header_.prefers_plain, false);
  if (header_.payload_bytes % value_bytes(coding_) != 0)
    return {ErrorCode::mismatch,
            concat("message from ", flow.peer_name(), ": a coded payload of ", header_.payload_bytes, " bytes")};
  waiting_ = !receiver.may_receive(flow, header_);
  if (waiting_ || stopped_) return {};
  if (coding_ == Coding::none && !choice_.pays() && wire::coding_of(header_) != Coding::none)
    choice_.on_plain(header_.payload_bytes);
  begin_ += wire::kHeaderBytes;
  in_payload_ = true;
  payload_ = {};
  received_bytes_ = 0;

  auto place = receiver.accept(flow, header_, false);
  if (stopped_) return {};
  if (Status status = check_place(place, header_); !status.ok()) return status;
  payload_ = place.value();
  if (is_coded()) return {};
  invariant(begin_ <= end_, "a header that was taken had been read");
  received_bytes_ = std::min(buffered_bytes(), payload_.size());
  std::ranges::copy(buffer_.span().subspan(begin_, received_bytes_), payload_.begin());
  begin_ += received_bytes_;
  return {};
}

/// Decodes what has come of a coded payload, segment by segment.
Status MessageReader::decode_segments(const Flow& flow) {
  const std::int64_t begun_ns = now_ns();
  const std::size_t before = received_bytes_;
  while (received_bytes_ < payload_.size()) {
    const auto received = std::span<const std::byte>(buffer_.span()).subspan(begin_, buffered_bytes());
    const std::size_t plain_bytes = segment_plain_bytes();
    const auto size_bytes = segment_bytes(received, plain_bytes);
    if (!size_bytes.ok()) return size_bytes.status().with_context("message from " + flow.peer_name());
    if (!size_bytes.value() || received.size() < *size_bytes.value()) break;
    const auto values = payload_.subspan(received_bytes_, plain_bytes);
    if (Status status = decode_segment(coding_, received.first(*size_bytes.value()), values); !status.ok())
      return status.with_context("message from " + flow.peer_name());
    begin_ += *size_bytes.value();
    received_bytes_ += plain_bytes;
    saved_bytes_ += plain_bytes - std::min(plain_bytes, *size_bytes.value());
  }
  if (received_bytes_ > before) choice_.on_coded(received_bytes_ - before, now_ns() - begun_ns);
  return {};
}

std::size_t MessageReader::wanted_bytes() const {
  one_thread_.check();
  if (!in_payload_ || stopped_) return 0;
  if (!is_coded()) return payload_.size() - received_bytes_;
  const auto received = std::span<const std::byte>(buffer_.span()).subspan(begin_, buffered_bytes());
  const auto size_bytes = segment_bytes(received, segment_plain_bytes());
  const std::size_t whole = size_bytes.ok() && size_bytes.value() ? *size_bytes.value() : kSegmentHeadBytes;
  return whole - std::min(whole, received.size());
}

Status MessageReader::finish_message(Flow& flow, Receiver& receiver) {
  in_payload_ = false;
  ++message_count_;
  const std::span<const std::byte> payload = payload_;
  payload_ = {};
  received_bytes_ = 0;
  return receiver.on_message(flow, header_, payload, {});
}

}  // namespace poseidon::tcp
