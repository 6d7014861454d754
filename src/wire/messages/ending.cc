#include "wire/messages/ending.h"

#include <string>

namespace poseidon::wire {

namespace {

constexpr std::uint64_t kPlanned = 1;

Status read_status(const Header& header, std::span<const std::byte> payload) {
  const bool known = header.divisor > 0 && header.divisor <= static_cast<std::uint32_t>(ErrorCode::shut_down);
  return {known ? static_cast<ErrorCode>(header.divisor) : ErrorCode::aborted, as_text(payload)};
}

}  // namespace

Refuse Refuse::read(const Header& header, std::span<const std::byte> payload) {
  Refuse refuse{read_status(header, payload), std::nullopt};
  if (refuse.status.code() == ErrorCode::peer_lost) refuse.departed_rank = header.rank;
  return refuse;
}

TextMessage Refuse::make(const Header& request) const {
  Header header;
  header.kind = Kind::refuse;
  header.rank = departed_rank.value_or(request.rank);
  header.worker_count = request.worker_count;
  header.unit = request.unit;
  header.chunk = request.chunk;
  header.step = request.step;
  header.divisor = static_cast<std::uint32_t>(status.code());
  return with_text(header, status.message());
}

Abort Abort::read(const Header& header, std::span<const std::byte> payload) {
  return {read_status(header, payload), header.step == kPlanned};
}

TextMessage Abort::make() const {
  Header header;
  header.kind = Kind::abort;
  header.step = planned ? kPlanned : 0;
  header.divisor = static_cast<std::uint32_t>(status.code());
  return with_text(header, status.message());
}

Header Goodbye::make() {
  Header header;
  header.kind = Kind::goodbye;
  header.priority = kLastPriority;
  return header;
}

}  // namespace poseidon::wire
