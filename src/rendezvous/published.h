// What the members of a job publish in its store: the keys, and the texts behind them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "rendezvous/members.h"

namespace poseidon {

/// The number of the generation that is wanted, one entry of each slot, and who takes part in the last generation.
std::string generation_key(const std::string& job);
std::string member_key(const std::string& job, int slot);
std::string roster_key(const std::string& job);
/// Why one of a generation has given up before all had met, and which of its slots need its store no longer.
std::string failure_key(const std::string& job, std::uint32_t generation);
std::string left_key(const std::string& job, std::uint32_t generation, int slot);

/// 0 for a text that is no number.
std::uint32_t parse_generation(const std::string& text);

/// What must be equal on all ranks, in the order in which differences are reported.
using Facts = std::vector<std::pair<std::string, std::string>>;
Facts shared_facts(const Options& options);

/// What a process says of itself.
struct Entry {
  std::uint32_t generation = 0;  // that it wants to be part of; 0: this is no entry
  std::string nonce;             // tells it from others that claim the same slot
  Member member;
};
std::string make_nonce();
std::string to_text(const Entry& entry, const Facts& facts);
Entry parse_entry(const std::string& text);

/// The first difference between what this process and the one in `slot`, whose text is given, believe.
Status compare(const Options& options, int slot, const std::string& text, const Facts& facts);

/// Which process has given up, and why.
struct Failure {
  int slot = -1;      // -1: this is no failure
  std::string nonce;  // of its entry: another process in the same slot has not failed
  std::string why;
};
std::string to_text(const Failure& failure);
Failure parse_failure(const std::string& text);

/// Who takes part in a generation.
struct Roster {
  std::uint32_t generation = 0;                     // 0: this is no roster
  std::vector<std::pair<int, std::string>> places;  // slots in order, each with the nonce of the process that has it
};
std::string to_text(const Roster& roster);
Roster parse_roster(const std::string& text);

}  // namespace poseidon
