#include "collective/messages.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"
#include "poseidon/collective.h"

namespace poseidon {

namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
// All messages of a rank take one flow, and one place in its queue, so that none overtakes another one.
constexpr Priority kPriority{512, 0};

}  // namespace

Messages::~Messages() {
  for (Waiting& one : waiting_) links_.pool->give_back(std::move(one.buffer));
}

wire::Envelope Messages::about(std::uint64_t number) const {
  wire::Envelope envelope{.priority = kPriority.level, .rank = links_.rank, .unit = communicator_.id};
  envelope.step = number;
  return envelope;
}

std::string Messages::name_of(std::uint32_t rank) const { return concat("rank ", rank, " of the group"); }

Status Messages::send(std::uint64_t task, std::uint32_t to, MessageKind kind, std::span<const std::byte> data) {
  one_thread_.check();
  Sending& sending = sending_.emplace(task, Sending{task, to, ++sent_[to], kind, {}}).first->second;
  const bool unasked = data.size() <= kUnaskedBytes;
  if (!unasked) sending.rest = data;
  send_piece(sending, 0, data.size(), unasked ? data : std::span<const std::byte>());
  const auto begun = sending_.find(task);
  if (begun == sending_.end() || !begun->second.gone) return {};
  return {ErrorCode::peer_lost, name_of(to) + " has left, and cannot be sent to; let it receive before it ends"};
}

void Messages::send_piece(Sending& sending, std::size_t offset_bytes, std::size_t total_bytes,
                          std::span<const std::byte> piece) {
  Flow* const flow = links_.peers[communicator_.ranks[sending.to]][kPriority.priority_class];
  if (flow == nullptr) {
    sending.gone = true;
    return;
  }
  const wire::Piece body{.dtype = DType::int64,
                         .is_sent = true,
                         .total_bytes = total_bytes,
                         .offset_bytes = offset_bytes,
                         .tag = sending.kind.tag,
                         .signature = sending.kind.label};
  Pieces pieces;
  if (!piece.empty()) pieces.push_back(piece);
  ++sending.pending_count;
  flow->send(body.make(about(sending.number)), std::move(pieces), [this, task = sending.task](const Status& status) {
    const auto found = sending_.find(task);
    invariant(found != sending_.end() && found->second.pending_count > 0, "a piece is sent once, before its call ends");
    --found->second.pending_count;
    found->second.gone |= !status.ok();
    end_if_sent(task);
  });
}

void Messages::end_if_sent(std::uint64_t task) {
  const auto found = sending_.find(task);
  const Sending& sending = found->second;
  if (sending.pending_count > 0 || ((!sending.rest.empty() || sending.gone) && !failed_)) return;
  const std::uint32_t to = found->second.to;
  sending_.erase(found);
  on_end_({task, to});
}

Status Messages::ready(std::uint32_t rank, std::uint64_t number) {
  one_thread_.check();
  const auto found = std::ranges::find_if(
      sending_, [&](const auto& one) { return one.second.to == rank && one.second.number == number; });
  if (found == sending_.end() || found->second.rest.empty())
    return {ErrorCode::mismatch, concat(name_of(rank), " asks for message ", number, ", which is not for it")};
  Sending& sending = found->second;
  const auto data = std::exchange(sending.rest, {});
  ++sending.pending_count;  // as long as pieces are added
  for (std::size_t offset = 0; offset < data.size(); offset += kPieceBytes)
    send_piece(sending, offset, data.size(), data.subspan(offset, std::min(kPieceBytes, data.size() - offset)));
  --sending.pending_count;
  end_if_sent(sending.task);
  return {};
}

Status Messages::receive(std::uint64_t task, std::uint32_t from, MessageKind kind, std::span<std::byte> memory) {
  one_thread_.check();
  Receiving& call = receiving_.emplace_back(Receiving{task, from, kind, memory, {}, 0, 0});
  const auto found = std::ranges::find_if(
      waiting_, [&](const Waiting& one) { return !one.has_call && fits(call, one.rank, one.kind.tag); });
  if (found == waiting_.end()) return {};
  if (Status status = bind(call, found->rank, found->number, found->total_bytes, found->kind.label); !status.ok())
    return status;
  found->has_call = true;
  if (!found->arrived) return {};
  Buffer buffer = std::move(found->buffer);
  waiting_bytes_ -= buffer.size();
  const bool whole = buffer || found->total_bytes == 0;
  waiting_.erase(found);
  if (whole)
    take_whole(call, buffer.span());
  else
    ask_for_rest(call);
  links_.pool->give_back(std::move(buffer));
  return {};
}

/// Notes that this message is the call's.
Status Messages::bind(Receiving& call, std::uint32_t rank, std::uint64_t number, std::size_t total_bytes,
                      std::uint32_t label) {
  if (label != call.kind.label)
    return {ErrorCode::mismatch, concat(name_of(rank), " sends another dtype with tag ", call.kind.tag,
                                        " than recv takes here; give both the same")};
  if (total_bytes != call.memory.size())
    return {ErrorCode::mismatch,
            concat(name_of(rank), " sends ", total_bytes, " bytes with tag ", call.kind.tag, ", but recv takes ",
                   call.memory.size(), " here; give both the same shape and dtype")};
  call.message = {rank, number};
  return {};
}

Messages::Receiving* Messages::bound(std::uint32_t rank, std::uint64_t number) {
  const auto found = std::ranges::find(receiving_, std::optional(std::pair(rank, number)), &Receiving::message);
  return found == receiving_.end() ? nullptr : &*found;
}

void Messages::take_whole(Receiving& call, std::span<const std::byte> payload) {
  if (!payload.empty() && payload.data() != call.memory.data())
    std::memcpy(call.memory.data(), payload.data(), payload.size());
  end(call);
}

void Messages::ask_for_rest(const Receiving& call) {
  Flow* const flow = links_.peers[communicator_.ranks[call.message->first]][kPriority.priority_class];
  if (flow == nullptr) return;
  flow->send(wire::Ready{.is_sent = true}.make(about(call.message->second)), {}, [](const Status&) {});
}

void Messages::end(const Receiving& call) {
  const MessageEnd ended{call.task, call.message->first};
  receiving_.remove_if([&call](const Receiving& one) { return &one == &call; });
  on_end_(ended);
}

Result<std::span<std::byte>> Messages::accept(std::uint32_t rank, const wire::Header& header, bool lent) {
  one_thread_.check();
  const auto piece = wire::Piece::read(header);
  if (header.payload_bytes > piece.total_bytes || piece.offset_bytes > piece.total_bytes - header.payload_bytes)
    return Status(ErrorCode::mismatch,
                  concat("a piece of message ", header.step, " goes beyond its ", piece.total_bytes, " bytes"));
  if (Receiving* const call = bound(rank, header.step)) {
    if (piece.total_bytes != call->memory.size() || header.payload_bytes > call->memory.size() - call->accepted_bytes)
      return Status(ErrorCode::mismatch, concat("message ", header.step, " has more bytes than it said"));
    call->accepted_bytes += header.payload_bytes;
    return lent ? std::span<std::byte>() : call->memory.subspan(piece.offset_bytes, header.payload_bytes);
  }
  const bool whole = header.payload_bytes == piece.total_bytes;
  if (piece.offset_bytes != 0 || (!whole && header.payload_bytes != 0) || (whole && piece.total_bytes > kUnaskedBytes))
    return Status(ErrorCode::mismatch, concat("message ", header.step, " comes without having been asked for"));
  const auto call = std::ranges::find_if(receiving_, [&](const Receiving& one) { return fits(one, rank, piece.tag); });
  if (call != receiving_.end()) {
    if (Status status = bind(*call, rank, header.step, piece.total_bytes, piece.signature); !status.ok()) return status;
    call->accepted_bytes += header.payload_bytes;
    return lent ? std::span<std::byte>() : call->memory.first(header.payload_bytes);
  }
  Waiting& waiting = waiting_.emplace_back(
      Waiting{rank, header.step, {piece.tag, piece.signature}, piece.total_bytes, {}, false, false});
  if (header.payload_bytes == 0) return std::span<std::byte>();
  const bool has_room = waiting_bytes_ + header.payload_bytes <= kMostUnaskedBytes;
  if (has_room) waiting.buffer = links_.pool->try_take(header.payload_bytes);
  waiting_bytes_ += waiting.buffer.size();
  if (!waiting.buffer)
    return Status(ErrorCode::refused, concat("there is no memory left for the messages of ", name_of(rank),
                                             "; let this rank receive them sooner"));
  return waiting.buffer.span();
}

Status Messages::take(std::uint32_t rank, const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  if (failed_) return {};
  const auto piece = wire::Piece::read(header);
  const bool only_says = header.payload_bytes == 0 && piece.total_bytes > 0;
  const auto waiting =
      std::ranges::find_if(waiting_, [&](const Waiting& one) { return one.rank == rank && one.number == header.step; });
  if (waiting == waiting_.end()) {
    Receiving* const call = bound(rank, header.step);
    invariant(call != nullptr, "a piece that is complete was accepted");
    const auto place = call->memory.subspan(piece.offset_bytes, payload.size());
    if (!payload.empty() && payload.data() != place.data()) std::memcpy(place.data(), payload.data(), payload.size());
    call->arrived_bytes += payload.size();
    if (only_says)
      ask_for_rest(*call);
    else if (call->arrived_bytes == call->memory.size())
      end(*call);
    return {};
  }
  waiting->arrived = true;
  if (!payload.empty() && payload.data() != waiting->buffer.data())
    std::memcpy(waiting->buffer.data(), payload.data(), payload.size());
  if (!waiting->has_call) return {};
  Buffer buffer = std::move(waiting->buffer);
  waiting_bytes_ -= buffer.size();
  waiting_.erase(waiting);
  if (only_says)
    ask_for_rest(*bound(rank, header.step));
  else
    take_whole(*bound(rank, header.step), buffer.span());
  links_.pool->give_back(std::move(buffer));
  return {};
}

void Messages::fail() {
  one_thread_.check();
  failed_ = true;
  for (const Receiving& call : std::exchange(receiving_, {})) on_end_({call.task, 0});
  std::vector<std::uint64_t> tasks;
  for (auto& [task, sending] : sending_) tasks.push_back(task);
  for (const std::uint64_t task : tasks) end_if_sent(task);
}

bool Messages::lacks(std::uint32_t rank) const {
  one_thread_.check();
  const auto awaits = [this, rank](const Receiving& call) {
    if (call.message) return call.message->first == rank;
    return call.from == rank || (call.from == kAnySource && is_last(rank));
  };
  return std::ranges::any_of(receiving_, awaits) || std::ranges::any_of(sending_, [rank](const auto& one) {
           return one.second.to == rank && (!one.second.rest.empty() || one.second.gone);
         });
}

/// Whether all other ranks but this one and `rank` have left.
bool Messages::is_last(std::uint32_t rank) const {
  for (std::uint32_t other = 0; other < communicator_.size(); ++other)
    if (other != rank && other != communicator_.rank && links_.peers[communicator_.ranks[other]].front() != nullptr)
      return false;
  return true;
}

std::string Messages::waiting_for() const {
  one_thread_.check();
  if (!receiving_.empty()) {
    const Receiving& call = receiving_.front();
    const std::uint32_t from = call.message ? call.message->first : call.from;
    return concat("waiting for a message with tag ", call.kind.tag, " from ",
                  from == kAnySource ? std::string("any rank") : concat("rank ", communicator_.ranks[from]));
  }
  for (const auto& [task, sending] : sending_)
    if (!sending.rest.empty())
      return concat("waiting for rank ", communicator_.ranks[sending.to], " to receive a message with tag ",
                    sending.kind.tag);
  return sending_.empty() ? "" : "sending a message";
}

}  // namespace poseidon
