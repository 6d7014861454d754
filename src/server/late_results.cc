#include "server/late_results.h"

#include <algorithm>
#include <string>
#include <utility>

namespace poseidon {

void LateResults::end(const wire::Header& result, const Result<std::shared_ptr<const Buffer>>& payload,
                      std::vector<std::uint32_t> ranks) {
  last_step_ = result.step;
  if (!ranks.empty()) kept_.push_back({result, payload, std::move(ranks)});
}

/// The step that has yet to be pushed by this rank; the end for none.
std::vector<LateResults::Ended>::const_iterator LateResults::find(const wire::Header& header) const {
  return std::ranges::find_if(kept_, [&](const Ended& one) {
    return one.result.step == header.step && std::ranges::find(one.ranks, header.rank) != one.ranks.end();
  });
}

Status LateResults::admit(const wire::Header& header, std::size_t size_bytes) const {
  const std::string about = "the server refuses the push of rank " + std::to_string(header.rank) + " in step " +
                            std::to_string(header.step) + ": ";
  const auto ended = find(header);
  if (ended == kept_.end() || in_flight.has(header.rank))
    return {ErrorCode::refused, about + "it has pushed this chunk already"};
  const bool has_size = (header.flags & wire::kAbsent) == 0 && (ended->result.flags & wire::kAbsent) == 0;
  if (header.dtype != ended->result.dtype || (has_size && size_bytes != ended->result.payload_bytes))
    return {ErrorCode::refused, about + "it has " + std::to_string(size_bytes) + " bytes of " +
                                    std::string(dtype_name(header.dtype)) + ", others had " +
                                    std::to_string(ended->result.payload_bytes) + " of " +
                                    std::string(dtype_name(ended->result.dtype)) + "; the ranks' models differ"};
  return {};
}

void LateResults::answer(const wire::Header& header, Requester& to) {
  const auto ended = find(header);
  if (ended == kept_.end()) return;
  wire::Header result = ended->result;
  result.rank = header.rank;
  result.priority = header.priority;
  result.flags |= wire::kLate;
  result.rows = static_cast<std::uint32_t>(last_step_ - header.step);
  const bool wants_result = (header.flags & wire::kNoResult) == 0;
  if (!ended->payload.ok())
    to.refuse(result, ended->payload.status());
  else
    to.send(result, wants_result ? ended->payload.value() : nullptr);
  const auto answered = kept_.begin() + (ended - kept_.cbegin());
  std::erase(answered->ranks, header.rank);
  if (answered->ranks.empty()) kept_.erase(answered);
}

}  // namespace poseidon
