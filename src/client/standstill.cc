#include "client/standstill.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "plan/mesh.h"

namespace poseidon {

namespace {

constexpr std::uint32_t kTellAfter = 2;  // beats; what is told has to reach the others before the job ends
constexpr std::uint32_t kBeats = 4;
constexpr int kFreshIntervals = 3;  // a heartbeat that is older says nothing

/// How many heartbeats it takes at most until what one member knows has reached all.
std::uint32_t longest_distance(std::size_t worker_count) {
  return worker_count <= kFullMesh ? 1 : static_cast<std::uint32_t>(std::bit_width(worker_count - 1));
}

std::string ranks_text(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

Standstill::Standstill(std::size_t worker_count, std::vector<std::size_t> neighbours, std::chrono::nanoseconds interval)
    : fresh_ns_((kFreshIntervals * interval).count()), most_(kBeats + 2 * longest_distance(worker_count)) {
  neighbours_.reserve(neighbours.size());
  for (const std::size_t rank : neighbours) neighbours_.push_back({.rank = rank});
}

void Standstill::heard(std::size_t rank, std::uint32_t level, std::int64_t now_ns) {
  one_thread_.check();
  const auto found = std::ranges::find(neighbours_, rank, &Neighbour::rank);
  if (found == neighbours_.end()) return;
  found->level = level;
  found->heard_ns = now_ns;
  if (level == 0) found->waits_for.clear();
}

void Standstill::note(std::size_t rank, std::string waits_for) {
  one_thread_.check();
  const auto found = std::ranges::find(neighbours_, rank, &Neighbour::rank);
  if (found != neighbours_.end()) found->waits_for = std::move(waits_for);
}

bool Standstill::is_fresh(const Neighbour& neighbour, std::int64_t now_ns) const {
  return neighbour.heard_ns != 0 && now_ns - neighbour.heard_ns <= fresh_ns_;
}

std::uint32_t Standstill::beat(bool stands, std::int64_t now_ns) {
  one_thread_.check();
  if (!stands) return stood_ = level_ = 0;
  ++stood_;
  for (const Neighbour& neighbour : neighbours_)
    level_ = std::min(level_, is_fresh(neighbour, now_ns) ? neighbour.level : 0);
  return ++level_;
}

bool Standstill::is_to_tell() { return one_thread_.checked(stood_) == kTellAfter; }

std::string Standstill::others(std::int64_t now_ns) const {
  one_thread_.check();
  std::map<std::string, std::vector<std::size_t>> ranks;
  for (const Neighbour& neighbour : neighbours_) {
    if (!is_fresh(neighbour, now_ns)) continue;
    const std::string text = neighbour.level == 0 ? "not inside a wait of Poseidon" : neighbour.waits_for;
    if (!text.empty()) ranks[text].push_back(neighbour.rank);
  }
  std::string text;
  for (const auto& [what, whose] : ranks) text += "; " + ranks_text(whose) + ": " + what;
  return text;
}

}  // namespace poseidon
