#include "collective/collectives.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"

namespace poseidon {

Collectives::~Collectives() {
  for (auto& [key, pieces] : early_)
    for (Early& piece : pieces) links_.pool->give_back(std::move(piece.buffer));
}

Status Collectives::add(Communicator communicator) {
  one_thread_.check();
  const std::uint32_t id = communicator.id;
  Entry& entry = communicators_[id];
  invariant(entry.messages == nullptr, "a communicator has an id of its own");
  entry.communicator = std::move(communicator);
  entry.messages =
      std::make_unique<Messages>(entry.communicator, links_, [this](MessageEnd end) { on_end_(end.task, end.source); });
  return replay({id, kMessages});
}

/// Hands over a piece of a message that is complete, in memory of this object.
Status Collectives::deliver_message(const wire::Header& header, std::span<const std::byte> payload) {
  Entry* const entry = entry_of(header);
  if (entry == nullptr) return unknown(header);
  const std::uint32_t rank = rank_in(entry->communicator, header.rank);
  const auto accepted = entry->messages->accept(rank, header, true);
  return accepted.ok() ? entry->messages->take(rank, header, payload) : accepted.status();
}

std::uint32_t Collectives::rank_in(const Communicator& communicator, std::uint32_t peer) const {
  const auto found = std::ranges::find(communicator.ranks, peer);
  return static_cast<std::uint32_t>(found - communicator.ranks.begin());
}

/// The communicator of a message, if this rank and its sender are in it.
Collectives::Entry* Collectives::entry_of(const wire::Header& header) {
  const auto found = communicators_.find(header.unit);
  if (found == communicators_.end()) return nullptr;
  const Communicator& communicator = found->second.communicator;
  return rank_in(communicator, header.rank) < communicator.size() ? &found->second : nullptr;
}

Status Collectives::unknown(const wire::Header& header) const {
  return {ErrorCode::mismatch, concat("rank ", header.rank, " makes a call of group ", header.unit,
                                      " of which it is no member here; make the same groups on all ranks")};
}

Status Collectives::ended(const wire::Header& header) const {
  return {ErrorCode::mismatch,
          concat("rank ", header.rank, " makes another call as call ", header.step, " of group ", header.unit,
                 ", which has ended here; make the same calls in the same order on all its ranks")};
}

Status Collectives::start(std::uint32_t communicator, CollectiveCall call, std::uint64_t task) {
  one_thread_.check();
  const auto found = communicators_.find(communicator);
  invariant(found != communicators_.end(), "a call is of a communicator that was added");
  if (failed_) {
    on_end_(task, 0);
    return {};
  }
  Communicator& of = found->second.communicator;
  const CallKey key{communicator, ++of.calls};
  // `chunk_bytes_` is a multiple of every element's size.
  auto exchange = std::make_unique<ChunkExchange>(NumberedCall{std::move(call), key.second, chunk_bytes_}, of, links_,
                                                  [this, key] { settle(key); });
  running_.emplace(key, Running{std::move(exchange), task});
  return inside(key, [&](ChunkExchange& begun) {
    begun.start();
    return replay(key);
  });
}

/// Calls an exchange, and ends its call if it is done then. What is sent may leave at once.
Status Collectives::inside(const CallKey& key, const std::function<Status(ChunkExchange&)>& work) {
  invariant(!inside_, "an exchange is called by its loop, and not by another one");
  inside_ = key;
  const auto leave = [this](const CallKey*) { inside_.reset(); };  // also where there is no memory
  Status status;
  {
    const std::unique_ptr<const CallKey, decltype(leave)> guard(&key, leave);
    ChunkExchange& exchange = *running_.at(key).exchange;
    status = work(exchange);
    if (status.ok()) status = exchange.departure();
  }
  settle(key);
  return status;
}

/// Gives a call that begins, or a communicator that is added (`kMessages`), what has come before.
Status Collectives::replay(const CallKey& key) {
  const auto found = early_.find(key);
  if (found == early_.end()) return {};
  for (auto piece = found->second.begin(); piece != found->second.end();) {
    if (!piece->arrived) {
      ++piece;  // on_message() delivers it
      continue;
    }
    Status status = key.second == kMessages ? deliver_message(piece->header, piece->buffer.span())
                                            : deliver(key, piece->header, piece->buffer.span());
    early_bytes_ -= piece->buffer.size();
    links_.pool->give_back(std::move(piece->buffer));
    piece = found->second.erase(piece);
    if (!status.ok()) return status;
  }
  if (found->second.empty()) early_.erase(found);
  return {};
}

/// Hands over a message that is complete, in memory of this object.
Status Collectives::deliver(const CallKey& key, const wire::Header& header, std::span<const std::byte> payload) {
  ChunkExchange& exchange = *running_.at(key).exchange;
  const Communicator& communicator = communicators_.at(key.first).communicator;
  const std::uint32_t rank = rank_in(communicator, header.rank);
  if (rank >= communicator.size()) return unknown(header);
  if (header.kind == wire::Kind::ready) return exchange.ready(rank, wire::Ready::read(header));
  const auto accepted = exchange.accept(rank, header, true);
  if (accepted.ok()) exchange.receive(rank, header, payload);
  return accepted.status();
}

/// Ends a call that is done.
void Collectives::settle(const CallKey& key) {
  if (inside_ == key) return;  // whoever is inside calls this again
  const auto found = running_.find(key);
  if (found == running_.end() || !found->second.exchange->done()) return;
  const std::uint64_t task = found->second.task;
  running_.erase(found);
  on_end_(task, 0);
}

Status Collectives::send(std::uint32_t communicator, std::uint32_t to, MessageKind kind,
                         std::span<const std::byte> data, std::uint64_t task) {
  one_thread_.check();
  if (!failed_) return communicators_.at(communicator).messages->send(task, to, kind, data);
  on_end_(task, 0);
  return {};
}

Status Collectives::receive(std::uint32_t communicator, std::uint32_t from, MessageKind kind,
                            std::span<std::byte> memory, std::uint64_t task) {
  one_thread_.check();
  if (!failed_) return communicators_.at(communicator).messages->receive(task, from, kind, memory);
  on_end_(task, 0);
  return {};
}

Result<std::span<std::byte>> Collectives::accept(const wire::Header& header, bool lent) {
  one_thread_.check();
  Entry* const entry = entry_of(header);
  if (entry == nullptr && communicators_.contains(header.unit)) return unknown(header);
  if (wire::Piece::read(header).is_sent) {
    if (entry == nullptr) return keep(header, {header.unit, kMessages});
    return entry->messages->accept(rank_in(entry->communicator, header.rank), header, lent);
  }
  const CallKey key{header.unit, header.step};
  if (const auto running = running_.find(key); running != running_.end() && entry != nullptr)
    return running->second.exchange->accept(rank_in(entry->communicator, header.rank), header, lent);
  if (entry != nullptr && header.step <= entry->communicator.calls) return ended(header);
  return keep(header, key);
}

/// Makes room for a piece of a call that this rank has not begun.
Result<std::span<std::byte>> Collectives::keep(const wire::Header& header, const CallKey& key) {
  if (header.payload_bytes > kUnaskedBytes)
    return Status(ErrorCode::mismatch, concat("rank ", header.rank, " sends ", header.payload_bytes,
                                              " bytes of a call that this rank has not begun"));
  const bool has_room = early_bytes_ + header.payload_bytes <= kMostUnaskedBytes;
  Early piece{header, has_room ? links_.pool->try_take(header.payload_bytes) : Buffer(), false};
  early_bytes_ += piece.buffer.size();
  if (!piece.buffer && header.payload_bytes > 0)
    return Status(ErrorCode::refused, concat("there is no memory left for the calls of rank ", header.rank,
                                             " that this rank has not made; make them sooner"));
  return early_[key].emplace_back(std::move(piece)).buffer.span();
}

Status Collectives::on_message(const wire::Header& header, std::span<const std::byte> payload) {
  one_thread_.check();
  if (failed_) return {};
  const bool is_sent = wire::Piece::read(header).is_sent;
  const CallKey key{header.unit, is_sent ? kMessages : header.step};
  if (Early* const piece = early_piece(key, header)) {
    if (!payload.empty() && payload.data() != piece->buffer.data())
      std::memcpy(piece->buffer.data(), payload.data(), payload.size());
    piece->arrived = true;
    if (is_sent) return communicators_.contains(header.unit) ? replay(key) : Status();
    if (!running_.contains(key)) return {};
    return inside(key, [&](ChunkExchange&) { return replay(key); });
  }
  Entry* const entry = entry_of(header);
  invariant(entry != nullptr, "a piece that is complete was accepted");
  const std::uint32_t rank = rank_in(entry->communicator, header.rank);
  if (is_sent) return entry->messages->take(rank, header, payload);
  return inside(key, [&](ChunkExchange& exchange) {
    exchange.receive(rank, header, payload);
    return Status();
  });
}

/// The piece of this header that is being received into memory of this object; null if there is none.
Collectives::Early* Collectives::early_piece(const CallKey& key, const wire::Header& header) {
  const auto kept = early_.find(key);
  if (kept == early_.end()) return nullptr;
  const auto piece =
      std::ranges::find_if(kept->second, [&](const Early& one) { return !one.arrived && one.header == header; });
  return piece == kept->second.end() ? nullptr : &*piece;
}

Status Collectives::on_ready(const wire::Header& header) {
  one_thread_.check();
  Entry* const entry = entry_of(header);
  if (entry == nullptr && communicators_.contains(header.unit)) return unknown(header);
  if (wire::Ready::read(header).is_sent) {
    if (entry == nullptr) return unknown(header);
    return entry->messages->ready(rank_in(entry->communicator, header.rank), header.step);
  }
  const CallKey key{header.unit, header.step};
  if (entry != nullptr && running_.contains(key))
    return inside(key, [&](ChunkExchange&) { return deliver(key, header, {}); });
  if (entry != nullptr && header.step <= entry->communicator.calls) return ended(header);
  early_[key].push_back({header, {}, true});
  return {};
}

void Collectives::fail() {
  one_thread_.check();
  failed_ = true;
  for (auto& [id, entry] : communicators_) entry.messages->fail();
  std::vector<CallKey> keys;
  for (auto& [key, running] : running_) {
    running.exchange->fail();
    keys.push_back(key);
  }
  for (const CallKey& key : keys) settle(key);
}

bool Collectives::runs(std::uint64_t task) const {
  one_thread_.check();
  return std::ranges::any_of(running_, [task](const auto& one) { return one.second.task == task; }) ||
         std::ranges::any_of(communicators_, [task](const auto& one) { return one.second.messages->runs(task); });
}

bool Collectives::lacks(std::uint32_t peer) const {
  one_thread_.check();
  const auto lacks_of = [&](std::uint32_t id, const auto& what) {
    const Communicator& communicator = communicators_.at(id).communicator;
    const std::uint32_t rank = rank_in(communicator, peer);
    return rank < communicator.size() && what.lacks(rank);
  };
  return std::ranges::any_of(running_,
                             [&](const auto& one) { return lacks_of(one.first.first, *one.second.exchange); }) ||
         std::ranges::any_of(communicators_,
                             [&](const auto& one) { return lacks_of(one.first, *one.second.messages); });
}

std::string Collectives::waiting_for() const {
  one_thread_.check();
  if (!running_.empty()) {
    const ChunkExchange& oldest = *running_.begin()->second.exchange;
    return oldest.name() + " was " + oldest.waiting_for();
  }
  for (const auto& [id, entry] : communicators_)
    if (std::string waiting = entry.messages->waiting_for(); !waiting.empty()) return "this rank was " + waiting;
  return "";
}

}  // namespace poseidon
