#include "simulation/faults.h"

#include <numeric>

#include "simulation/simulated_world.h"

namespace poseidon::testing {

namespace {

constexpr std::size_t kLinesKept = 300;

}  // namespace

std::string_view fault_name(Fault fault) {
  constexpr std::array<std::string_view, kFaultKinds> kNames{
      "drop", "delay", "duplicate", "reorder", "cut", "half cut", "partition", "refusal", "kill", "replace"};
  return kNames[static_cast<std::size_t>(fault)];
}

std::size_t total(const FaultCounts& counts) { return std::accumulate(counts.begin(), counts.end(), std::size_t{0}); }

std::string describe(const FaultCounts& counts) {
  std::string text = std::to_string(total(counts)) + " faults:";
  for (std::size_t kind = 0; kind < kFaultKinds; ++kind) {
    text.append(kind == 0 ? " " : ", ").append(fault_name(static_cast<Fault>(kind)));
    text += " " + std::to_string(counts[kind]);
  }
  return text;
}

std::uint64_t mix(std::uint64_t seed, std::uint64_t value) {
  std::uint64_t mixed = seed + 0x9e3779b97f4a7c15u * (value + 1);
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return mixed ^ mixed >> 31;
}

std::uint64_t mix(std::uint64_t seed, std::string_view text) {
  std::uint64_t mixed = seed;
  for (const char c : text) mixed = mix(mixed, static_cast<unsigned char>(c));
  return mixed;
}

Draw draw(const FaultRates& rates, std::uint64_t key, std::uint64_t number, std::initializer_list<Fault> possible) {
  Draw drawn{std::nullopt, mix(key, number)};
  double point = static_cast<double>(drawn.bits >> 11) * 0x1p-53;
  for (const Fault fault : possible) {
    point -= rates[fault];
    if (point >= 0) continue;
    drawn.fault = fault;
    break;
  }
  return drawn;
}

void FaultLog::note(Fault fault, const std::string& where) {
  note_in_trace(std::string(fault_name(fault)) + " " + where);
  const std::int64_t time_ms = (now_ns() - begun_ns_) / 1'000'000;
  const std::lock_guard lock(mutex_);
  ++counts_[static_cast<std::size_t>(fault)];
  lines_.push_back(std::to_string(time_ms) + " ms " + std::string(fault_name(fault)) + " " + where);
  if (lines_.size() > kLinesKept) lines_.pop_front();
}

FaultCounts FaultLog::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::size_t FaultLog::total() const { return testing::total(counts()); }

std::string FaultLog::last() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const std::string& line : lines_) text += line + "\n";
  return text;
}

}  // namespace poseidon::testing
