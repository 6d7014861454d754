#include "server/chunk/outgoing_result.h"

#include <utility>

#include "base/clock.h"
#include "transport/coded_payload.h"

namespace poseidon {

void OutgoingResult::send(Requester& to, wire::Header header) {
  header.payload_bytes = values_->size();
  // A connection codes for itself what nobody else gets: its first bytes leave sooner.
  if (receiver_count_ > 1 && to.codes(values_->size())) {
    const Coding coding = wire::coding_of(header);
    if (!std::exchange(tried_, true) && coding != Coding::none) code(coding);
    if (coded_) {
      header.coding = coding;
      return to.send(header, coded_);
    }
  }
  to.send(header, values_);
}

void OutgoingResult::code(Coding coding) {
  Buffer room = pool_.try_take(coded_room_bytes(values_->size()));
  if (!room) return;
  const std::int64_t begun_ns = now_ns();
  const std::size_t coded_bytes = code_payload(coding, values_->span(), room.span()).size();
  if (choice_ != nullptr) choice_->on_coded(values_->size(), now_ns() - begun_ns);
  if (coded_bytes == 0) return pool_.give_back(std::move(room));
  room.resize(coded_bytes);
  coded_ = pool_.share(std::move(room));
}

}  // namespace poseidon
