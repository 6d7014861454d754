#include "transport/coded_payload.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/invariant.h"
#include "kernel/lossless.h"

namespace poseidon {

static_assert(kSegmentHeadBytes + kernel::most_coded_bytes(Coding::int8, kSegmentBytes) <= kSegmentRoomBytes);

CodedPayload::CodedPayload(Coding coding, std::vector<std::span<const std::byte>> pieces)
    : coding_(coding), pieces_(std::move(pieces)) {
  for (const auto& piece : pieces_) left_bytes_ += piece.size();
  invariant(left_bytes_ % value_bytes(coding) == 0, "a coded payload has whole values");
}

/// The next bytes, in one piece.
std::span<const std::byte> CodedPayload::take(std::size_t size_bytes) {
  left_bytes_ -= size_bytes;
  while (pieces_[piece_].empty()) ++piece_;
  const auto advance = [&](std::size_t count) {
    const auto taken = pieces_[piece_].first(count);
    pieces_[piece_] = pieces_[piece_].subspan(count);
    return taken;
  };
  if (pieces_[piece_].size() >= size_bytes) return advance(size_bytes);
  together_.resize(size_bytes);
  for (std::size_t done = 0; done < size_bytes;) {
    while (pieces_[piece_].empty()) ++piece_;
    const auto part = advance(std::min(pieces_[piece_].size(), size_bytes - done));
    std::ranges::copy(part, together_.begin() + static_cast<std::ptrdiff_t>(done));
    done += part.size();
  }
  return together_;
}

std::span<const std::byte> CodedPayload::next(std::span<std::byte> out) {
  invariant(!empty() && out.size() >= kSegmentRoomBytes, "a segment has values, and room");
  const auto values = take(std::min(left_bytes_, kSegmentBytes));
  std::byte* const coded = out.data() + kSegmentHeadBytes;
  std::size_t size_bytes = kernel::encode_lossless(coding_, values.data(), values.size() / value_bytes(coding_), coded);
  if (size_bytes >= values.size()) {
    size_bytes = values.size();
    std::memcpy(coded, values.data(), size_bytes);
  }
  const auto head = static_cast<std::uint32_t>(size_bytes);
  std::memcpy(out.data(), &head, sizeof head);
  return out.first(kSegmentHeadBytes + size_bytes);
}

std::span<const std::byte> code_payload(Coding coding, std::span<const std::byte> values, std::span<std::byte> out) {
  invariant(out.size() >= coded_room_bytes(values.size()), "a coded payload has room");
  CodedPayload payload(coding, {values});
  std::size_t used_bytes = 0;
  while (!payload.empty()) {
    used_bytes += payload.next(out.subspan(used_bytes)).size();
    const std::size_t plain_bytes = values.size() - payload.left_bytes();
    if (plain_bytes <= 2 * kSegmentBytes && !is_worth_decoding(used_bytes, plain_bytes)) return {};
  }
  return out.first(used_bytes);
}

Result<std::optional<std::size_t>> segment_bytes(std::span<const std::byte> received, std::size_t plain_bytes) {
  if (received.size() < kSegmentHeadBytes) return std::optional<std::size_t>();
  std::uint32_t size_bytes = 0;
  std::memcpy(&size_bytes, received.data(), sizeof size_bytes);
  if (size_bytes == 0 || size_bytes > plain_bytes)
    return Status(ErrorCode::mismatch,
                  concat("a segment of ", size_bytes, " bytes for values of ", plain_bytes, " bytes"));
  return std::optional(kSegmentHeadBytes + size_bytes);
}

Status decode_segment(Coding coding, std::span<const std::byte> segment, std::span<std::byte> values) {
  const auto coded = segment.subspan(kSegmentHeadBytes);
  if (coded.size() == values.size()) {
    std::ranges::copy(coded, values.begin());
    return {};
  }
  const std::size_t value_count = values.size() / value_bytes(coding);
  const kernel::Decoded done = kernel::decode_lossless(coding, coded, values.data(), value_count);
  if (done.malformed || done.value_count != value_count || done.coded_bytes != coded.size())
    return {ErrorCode::mismatch, concat("a coded segment that does not stand for ", value_count, " values")};
  return {};
}

}  // namespace poseidon
