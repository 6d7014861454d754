// What the members of a job publish in its store: the keys, and the format of the values.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"
#include "rendezvous/members.h"

namespace poseidon {

/// The keys of the wanted generation's number, of each slot's entry, and of the last generation's roster.
std::string generation_key(const std::string& job);
std::string member_key(const std::string& job, int slot);
std::string roster_key(const std::string& job);
/// The key of the table of entries that belongs to the roster.
std::string table_key(const std::string& job);
/// The keys for a process that has given up before all had met, and for a slot that no longer needs the store.
std::string failure_key(const std::string& job, std::uint32_t generation);
std::string left_key(const std::string& job, std::uint32_t generation, int slot);
/// The keys for the identity of the run that has this store, and for the last process that was refused, with the
/// reason.
std::string run_key(const std::string& job);
std::string refused_key(const std::string& job);
/// The keys for a newcomer that asks to have a slot, for the answer, and for the number of slots in which to look for
/// newcomers.
std::string application_key(const std::string& job, int slot);
std::string answer_key(const std::string& job, int slot);
std::string applied_key(const std::string& job);

/// How long to wait for a key that need not be there.
inline constexpr std::chrono::milliseconds kQuickLook{0};

/// The number in `text`, or 0 if it is not a number.
std::uint32_t parse_generation(std::string_view text);

/// Names and values that must be equal on all ranks, in the order in which differences are reported.
using Facts = std::vector<std::pair<std::string, std::string>>;
Facts shared_facts(const Options& options);
/// A text that is equal for equal facts, and short.
std::string digest_of(const Facts& facts);

/// What a process publishes about itself.
struct Entry {
  std::uint32_t generation = 0;  // the generation of which it wants to be part; 0: this is no entry
  std::string nonce;             // distinguishes it from others that claim the same slot
  std::string facts;             // digest_of() its facts
  Member member;
};
std::string make_nonce();
std::string to_text(const Entry& entry);
std::string to_text(const Entry& entry, const Facts& facts);
Entry parse_entry(std::string_view text);

/// Compares this process's facts with the published `text` of the process in `slot`. ErrorCode::mismatch names the
/// first difference.
Status compare(const Options& options, int slot, std::string_view text, const Facts& facts);

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

/// All entries of a roster in one value, so that P processes need P reads, and not P², to know each other. Of the facts
/// it has the digests: every process reads all of it.
std::string table_text(const Roster& roster, const std::vector<Entry>& entries);
/// Returns the entries, or nothing if the table is not that of the roster.
std::vector<Entry> parse_table(std::string_view text, const Roster& roster);

}  // namespace poseidon
