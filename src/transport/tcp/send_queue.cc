#include "transport/tcp/send_queue.h"

#include <algorithm>
#include <utility>

namespace poseidon::tcp {

std::span<const std::byte> SendQueue::Entry::piece(std::size_t index) const {
  return index == 0 ? std::span<const std::byte>(header) : payload[index - 1];
}

void SendQueue::push(const wire::Header& header, std::vector<std::span<const std::byte>> payload, Done done) {
  std::erase_if(payload, [](const auto& piece) { return piece.empty(); });
  Entry& entry = entries_.emplace_back();
  wire::encode(header, entry.header);
  entry.payload = std::move(payload);
  entry.done = std::move(done);
}

std::size_t SendQueue::fill(std::span<iovec> out, std::size_t limit_bytes) const {
  std::size_t used = 0;
  std::size_t piece = piece_;
  std::size_t offset_bytes = offset_bytes_;
  for (const Entry& entry : entries_) {
    for (; piece < entry.piece_count(); ++piece) {
      if (used == out.size() || limit_bytes == 0) return used;
      const auto rest = entry.piece(piece).subspan(offset_bytes);
      const std::size_t size_bytes = std::min(rest.size(), limit_bytes);
      // sendmsg only reads; iovec has no const form.
      out[used++] = {const_cast<std::byte*>(rest.data()), size_bytes};
      limit_bytes -= size_bytes;
      offset_bytes = 0;
    }
    piece = 0;
  }
  return used;
}

void SendQueue::advance(std::size_t count, std::vector<Done>& finished) {
  while (count > 0) {
    Entry& entry = entries_.front();
    const std::size_t left = entry.piece(piece_).size() - offset_bytes_;
    if (count < left) {
      offset_bytes_ += count;
      return;
    }
    count -= left;
    offset_bytes_ = 0;
    if (++piece_ < entry.piece_count()) continue;
    piece_ = 0;
    finished.push_back(std::move(entry.done));
    entries_.pop_front();
  }
}

std::vector<SendQueue::Done> SendQueue::take_all() {
  std::vector<Done> all;
  for (Entry& entry : entries_) all.push_back(std::move(entry.done));
  entries_.clear();
  piece_ = 0;
  offset_bytes_ = 0;
  return all;
}

}  // namespace poseidon::tcp
