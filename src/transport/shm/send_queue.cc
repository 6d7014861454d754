#include "transport/shm/send_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace poseidon::shm {

void SendQueue::push(const wire::Header& header, Pieces payload, Done done) {
  one_thread_.checked(waiting_).push(header.priority, {header, std::move(payload), std::move(done)});
}

void SendQueue::copy(std::span<std::byte> out) {
  one_thread_.check();
  invariant(out.size() <= left_bytes(), "no more is copied than the message has left");
  copied_bytes_ += out.size();
  const auto& pieces = current_->payload;
  while (!out.empty()) {
    const auto rest = pieces[piece_].subspan(offset_bytes_);
    const std::size_t size_bytes = std::min(rest.size(), out.size());
    if (size_bytes > 0) std::memcpy(out.data(), rest.data(), size_bytes);
    out = out.subspan(size_bytes);
    offset_bytes_ += size_bytes;
    if (offset_bytes_ < pieces[piece_].size()) continue;
    ++piece_;
    offset_bytes_ = 0;
  }
}

SendQueue::Done SendQueue::pop() {
  invariant(left_bytes() == 0, "a message leaves the queue when all of it has been copied");
  return drop();
}

SendQueue::Done SendQueue::drop() {
  Done done = std::move(current_->done);
  current_.reset();
  copied_bytes_ = 0;
  piece_ = 0;
  offset_bytes_ = 0;
  return done;
}

std::vector<SendQueue::Done> SendQueue::take_all() {
  one_thread_.check();
  std::vector<Done> all;
  while (!empty()) {
    begin();
    all.push_back(drop());
  }
  return all;
}

}  // namespace poseidon::shm
