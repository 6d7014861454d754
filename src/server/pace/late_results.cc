#include "server/pace/late_results.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/invariant.h"
#include "server/chunk/limits.h"
#include "server/chunk/push_refusal.h"

namespace poseidon {

LateResults::LateResults(std::uint32_t worker_count, std::shared_ptr<BufferPool> pool)
    : pool_(std::move(pool)),
      ended_bytes_(limits::kNodeBytes + sizeof(Ended) + worker_count / 2 * sizeof(std::uint32_t)) {}

bool LateResults::make_room(std::size_t size_bytes) {
  one_thread_.check();
  if (!pool_->try_charge(ended_bytes_)) return false;
  if (pool_->try_keep(ended_bytes_ + size_bytes)) {
    room_bytes_ = size_bytes;
    return true;
  }
  pool_->release(ended_bytes_);
  return false;
}

void LateResults::end(const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload,
                      std::vector<std::uint32_t> ranks) {
  one_thread_.check();
  invariant(result.step >= last_step_, "a chunk's steps end in their order");
  last_step_ = result.step;
  if (ranks.empty()) return;
  std::size_t payload_bytes = std::exchange(room_bytes_, 0);
  if (!payload.ok() || !payload.value()) pool_->end_keep(std::exchange(payload_bytes, 0));
  kept_.push_back({result, payload, std::move(ranks), payload_bytes});
}

/// Returns the ended step that this rank has yet to push, or the end if there is none.
std::list<LateResults::Ended>::const_iterator LateResults::find(const wire::Contribution& push) const {
  return std::ranges::find_if(kept_, [&](const Ended& one) {
    return one.result.step == push.step && std::ranges::find(one.ranks, push.rank) != one.ranks.end();
  });
}

Status LateResults::admit(const wire::Contribution& push, std::size_t size_bytes) const {
  one_thread_.check();
  const auto ended = find(push);
  if (ended == kept_.end() || incoming.has(push.rank)) return refused_push(push, "it has pushed this chunk already");
  const auto result = wire::StepResult::read(ended->result);
  if (push.result_dtype() != result.dtype)
    return refused_push(push, "it has " + std::string(dtype_name(push.result_dtype())) + ", others had " +
                                  std::string(dtype_name(result.dtype)) + "; build the same model on all ranks");
  const bool has_size = !push.absent && !result.absent;
  if (has_size && size_bytes != ended->result.payload_bytes)
    return refused_size(push, size_bytes, ended->result.payload_bytes);
  return {};
}

void LateResults::answer(const wire::Contribution& push, Requester& to) {
  one_thread_.check();
  const auto ended = find(push);
  if (ended == kept_.end()) return;
  auto body = wire::StepResult::read(ended->result);
  body.late = true;
  body.steps_since = static_cast<std::uint32_t>(last_step_ - push.step);
  wire::Header result = body.make(ended->result);
  result.rank = push.rank;
  result.priority = push.priority;
  const bool wants_result = push.wants_result;
  if (!ended->payload.ok())
    to.refuse(result, ended->payload.status());
  else
    to.send(result, wants_result ? ended->payload.value() : nullptr);
  const auto answered = kept_.erase(ended, ended);  // the same entry, but not const
  std::erase(answered->ranks, push.rank);
  if (!answered->ranks.empty()) return;
  const std::size_t payload_bytes = answered->payload_bytes;
  kept_.erase(answered);  // comes first, because what is kept counts as used
  pool_->end_keep(ended_bytes_ + payload_bytes);
  pool_->release(ended_bytes_);
}

}  // namespace poseidon
