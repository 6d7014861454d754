#include "client/vigil.h"

#include <algorithm>
#include <utility>

namespace poseidon {

namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kShortestInterval{200};
// P workers that all watch each other send P² heartbeats for each two intervals.
constexpr milliseconds kIntervalOfARank{8};
// All in intervals:
constexpr int kAskAfter = 4;
constexpr int kUnreachableAfter = 5;
constexpr int kFrozenAfter = 10;
constexpr int kFrozenAtTheLatest = 22;
// So many intervals without a call mean that this process did not run.
constexpr int kOwnPause = 3;

}  // namespace

Vigil::Vigil(std::size_t worker_count, std::size_t watched_count)
    : interval_(std::max(kShortestInterval, kIntervalOfARank * static_cast<int>(watched_count))),
      ranks_(worker_count) {}

std::vector<Vigil::Finding> Vigil::judge(std::int64_t now_ns, std::span<const std::int64_t> heard_ns,
                                         const std::function<Flow::Answer(std::size_t rank)>& answer) {
  one_thread_.check();
  const std::int64_t last_ns = std::exchange(judged_ns_, now_ns);
  if (nanoseconds(now_ns - last_ns) > kOwnPause * interval_) resumed_ns_ = now_ns;
  std::vector<Finding> findings;
  for (std::size_t rank = 0; rank < heard_ns.size(); ++rank) {
    if (heard_ns[rank] == 0)
      ranks_[rank] = {};
    else if (const auto finding = judge_one(rank, now_ns, heard_ns[rank], answer))
      findings.push_back(*finding);
  }
  return findings;
}

std::optional<Vigil::Finding> Vigil::judge_one(std::size_t rank, std::int64_t now_ns, std::int64_t heard_ns,
                                               const std::function<Flow::Answer(std::size_t rank)>& answer) {
  Watched& watched = ranks_[rank];
  if (const std::int64_t last_ns = std::exchange(watched.heard_ns, heard_ns); last_ns != 0 && heard_ns > last_ns) {
    watched.longest_gap_ns = std::max(watched.longest_gap_ns, heard_ns - last_ns);
    watched.unreachable = false;
    if (!std::exchange(watched.silent, false)) return std::nullopt;
    return Finding{rank, News::back, nanoseconds(heard_ns - last_ns)};
  }
  const nanoseconds silence(now_ns - std::max(heard_ns, resumed_ns_));
  const bool unanswered = std::exchange(watched.unanswered, false);
  if (watched.unreachable || silence < kAskAfter * interval_) return std::nullopt;
  const Flow::Answer got = answer(rank);
  watched.unanswered = got.missing >= kAskAfter * interval_ + 2 * got.round_trip;
  const nanoseconds patience = std::min<nanoseconds>(kFrozenAfter * interval_ + 2 * nanoseconds(watched.longest_gap_ns),
                                                     kFrozenAtTheLatest * interval_);
  // Asked twice, because what has been sent just now after a long pause is still on its way.
  if (unanswered && got.missing >= kUnreachableAfter * interval_ + 2 * got.round_trip) {
    watched.unreachable = watched.silent = true;
    return Finding{rank, News::unreachable, silence};
  }
  if (watched.silent || silence < patience) return std::nullopt;
  watched.silent = true;
  return Finding{rank, News::frozen, silence};
}

nanoseconds Vigil::unreachable_for(std::size_t rank, std::int64_t now_ns) const {
  one_thread_.check();
  return nanoseconds(ranks_[rank].unreachable ? now_ns - std::max(ranks_[rank].heard_ns, resumed_ns_) : 0);
}

}  // namespace poseidon
