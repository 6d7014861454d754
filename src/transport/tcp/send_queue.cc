#include "transport/tcp/send_queue.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace poseidon::tcp {

namespace {
constexpr std::size_t kStagedSegments = 2;
}  // namespace

std::span<const std::byte> SendQueue::piece_of(const Entry& entry, std::size_t index) const {
  if (index == 0) return entry.header;
  return entry.coded ? staged_ : entry.payload[index - 1];
}

void SendQueue::push(const wire::Header& header, Pieces payload, Done done, bool is_coded) {
  one_thread_.check();
  std::erase_if(payload, [](const auto& piece) { return piece.empty(); });
  Entry entry;
  wire::encode(header, entry.header);
  if (is_coded) {
    entry.saved_bytes = header.payload_bytes;
    for (const auto& piece : payload) entry.saved_bytes -= piece.size();
  } else if (header.coding != Coding::none) {
    entry.coded = std::make_unique<Coded>(header, CodedPayload(header.coding, payload));
  }
  entry.payload = std::move(payload);
  entry.done = std::move(done);
  waiting_.push(header.priority, std::move(entry));
}

/// Makes a coded message the current one, and codes what comes first, which shows whether it shrinks.
void SendQueue::begin_coded() {
  current_ = waiting_.pop();
  const std::size_t plain_bytes = stage();
  if (is_worth_decoding(staged_.size(), plain_bytes)) return;
  wire::Header header = current_->coded->header;
  header.coding = Coding::none;
  wire::encode(header, current_->header);
  current_->coded.reset();
  current_->saved_bytes = 0;
  staged_ = {};
}

/// Codes the next segments of the current message. Returns how many bytes their values have.
std::size_t SendQueue::stage() {
  stage_memory_.resize(kStagedSegments * kSegmentRoomBytes);
  CodedPayload& payload = current_->coded->payload;
  std::size_t used_bytes = 0;
  const std::size_t before = payload.left_bytes();
  const std::int64_t begun_ns = now_ns();
  for (std::size_t n = 0; n < kStagedSegments && !payload.empty(); ++n)
    used_bytes += payload.next(std::span(stage_memory_).subspan(used_bytes)).size();
  const std::size_t plain_bytes = before - payload.left_bytes();
  choice_.on_coded(plain_bytes, now_ns() - begun_ns);
  staged_ = std::span(stage_memory_).first(used_bytes);
  current_->saved_bytes += plain_bytes;
  current_->saved_bytes -= used_bytes;
  return plain_bytes;
}

std::size_t SendQueue::fill(std::span<iovec> out, std::size_t limit_bytes) {
  one_thread_.check();
  if (!current_ && !waiting_.empty() && waiting_.first().coded) begin_coded();
  if (current_ && current_->coded && staged_.empty()) stage();
  std::size_t used = 0;
  std::size_t piece = piece_;
  std::size_t offset_bytes = offset_bytes_;
  const auto add = [&](const Entry& entry) {
    const bool is_current = current_ && &entry == &*current_;
    if (entry.coded && !is_current) return false;  // it is coded when its turn comes
    for (; piece < piece_count_of(entry); ++piece) {
      if (used == out.size() || limit_bytes == 0) return false;
      const auto rest = piece_of(entry, piece).subspan(offset_bytes);
      const std::size_t size_bytes = std::min(rest.size(), limit_bytes);
      // sendmsg only reads the data, but iovec has no const form.
      out[used++] = {const_cast<std::byte*>(rest.data()), size_bytes};
      limit_bytes -= size_bytes;
      offset_bytes = 0;
    }
    piece = 0;
    return !entry.coded || entry.coded->payload.empty();
  };
  if (!current_ || add(*current_)) waiting_.visit(add);
  return used;
}

void SendQueue::advance(std::size_t count, std::vector<Done>& finished) {
  one_thread_.check();
  while (count > 0) {
    if (!current_) current_ = waiting_.pop();  // the system has taken no more than fill() described
    const std::size_t left = piece_of(*current_, piece_).size() - offset_bytes_;
    if (count < left) {
      offset_bytes_ += count;
      return;
    }
    count -= left;
    offset_bytes_ = 0;
    if (current_->coded && piece_ > 0 && !current_->coded->payload.empty()) {
      staged_ = {};
      continue;  // with the next segments
    }
    if (++piece_ < piece_count_of(*current_)) continue;
    piece_ = 0;
    staged_ = {};
    saved_bytes_ += current_->saved_bytes;
    finished.push_back(std::move(current_->done));
    current_.reset();
  }
}

std::vector<SendQueue::Done> SendQueue::take_all() {
  one_thread_.check();
  std::vector<Done> all;
  if (current_) all.push_back(std::move(current_->done));
  current_.reset();
  staged_ = {};
  while (!waiting_.empty()) all.push_back(waiting_.pop().done);
  piece_ = 0;
  offset_bytes_ = 0;
  return all;
}

}  // namespace poseidon::tcp
