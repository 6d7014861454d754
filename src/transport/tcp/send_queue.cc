#include "transport/tcp/send_queue.h"

#include <algorithm>
#include <utility>

namespace poseidon::tcp {

std::span<const std::byte> SendQueue::Entry::piece(std::size_t index) const {
  return index == 0 ? std::span<const std::byte>(header) : payload[index - 1];
}

void SendQueue::push(const wire::Header& header, Pieces payload, Done done) {
  one_thread_.check();
  std::erase_if(payload, [](const auto& piece) { return piece.empty(); });
  Entry entry;
  wire::encode(header, entry.header);
  entry.payload = std::move(payload);
  entry.done = std::move(done);
  waiting_.push(header.priority, std::move(entry));
}

std::size_t SendQueue::fill(std::span<iovec> out, std::size_t limit_bytes) const {
  one_thread_.check();
  std::size_t used = 0;
  std::size_t piece = piece_;
  std::size_t offset_bytes = offset_bytes_;
  const auto add = [&](const Entry& entry) {
    for (; piece < entry.piece_count(); ++piece) {
      if (used == out.size() || limit_bytes == 0) return false;
      const auto rest = entry.piece(piece).subspan(offset_bytes);
      const std::size_t size_bytes = std::min(rest.size(), limit_bytes);
      // sendmsg only reads the data, but iovec has no const form.
      out[used++] = {const_cast<std::byte*>(rest.data()), size_bytes};
      limit_bytes -= size_bytes;
      offset_bytes = 0;
    }
    piece = 0;
    return true;
  };
  if (!current_ || add(*current_)) waiting_.visit(add);
  return used;
}

void SendQueue::advance(std::size_t count, std::vector<Done>& finished) {
  one_thread_.check();
  while (count > 0) {
    if (!current_) current_ = waiting_.pop();  // the system has taken no more than fill() described
    const std::size_t left = current_->piece(piece_).size() - offset_bytes_;
    if (count < left) {
      offset_bytes_ += count;
      return;
    }
    count -= left;
    offset_bytes_ = 0;
    if (++piece_ < current_->piece_count()) continue;
    piece_ = 0;
    finished.push_back(std::move(current_->done));
    current_.reset();
  }
}

std::vector<SendQueue::Done> SendQueue::take_all() {
  one_thread_.check();
  std::vector<Done> all;
  if (current_) all.push_back(std::move(current_->done));
  current_.reset();
  while (!waiting_.empty()) all.push_back(waiting_.pop().done);
  piece_ = 0;
  offset_bytes_ = 0;
  return all;
}

}  // namespace poseidon::tcp
