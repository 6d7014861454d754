#include "rendezvous/published.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <optional>
#include <type_traits>

#include "base/hexadecimal.h"
#include "base/random_bytes.h"
#include "base/sha256.h"
#include "base/version.h"

namespace poseidon {

namespace {

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

/// Takes the text up to the separator, or all of it, off its beginning. The separator goes, too.
std::string_view take_part(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) parts.emplace_back(take_part(text, ','));
  return parts;
}

std::optional<std::string_view> value_in(std::string_view line, std::string_view key) {
  if (line.size() <= key.size() || !line.starts_with(key) || line[key.size()] != '=') return std::nullopt;
  return line.substr(key.size() + 1);
}

std::string_view value_of(std::string_view text, std::string_view key) {
  while (!text.empty())
    if (const auto value = value_in(take_part(text, '\n'), key)) return *value;
  return "nothing";
}

std::string lines_of(const Facts& facts) {
  std::string text;
  for (const auto& [key, value] : facts) text += key + "=" + value + "\n";
  return text;
}

template <typename T>
std::string text_of(const T& value) {
  if constexpr (std::is_enum_v<T>)
    return std::string(name_of(value));
  else if constexpr (std::is_integral_v<T>)
    return std::to_string(value);
  else if constexpr (std::is_same_v<T, std::string>)
    return value;
  else
    return joined(value);
}

/// Whether the field has the value that stands for "auto".
bool is_auto(const Options& options, std::string_view field) {
  return field == "chunk_bytes" && options.chunk_bytes == 0;
}

/// False unless the whole text is one number.
template <typename T>
bool parse(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

std::string generation_key(const std::string& job) { return "poseidon/" + job + "/generation"; }

std::string member_key(const std::string& job, int slot) { return concat("poseidon/", job, "/member/", slot); }

std::string roster_key(const std::string& job) { return "poseidon/" + job + "/roster"; }

std::string table_key(const std::string& job) { return "poseidon/" + job + "/table"; }

std::string failure_key(const std::string& job, std::uint32_t generation) {
  return concat("poseidon/", job, "/failed/", generation);
}

std::string left_key(const std::string& job, std::uint32_t generation, int slot) {
  return concat("poseidon/", job, "/left/", generation, "/", slot);
}

std::string run_key(const std::string& job) { return "poseidon/" + job + "/run"; }

std::string refused_key(const std::string& job) { return "poseidon/" + job + "/refused"; }

std::string application_key(const std::string& job, int slot) {
  return concat("poseidon/", job, "/application/", slot);
}

std::string answer_key(const std::string& job, int slot) { return concat("poseidon/", job, "/answer/", slot); }

std::string applied_key(const std::string& job) { return "poseidon/" + job + "/applied"; }

std::uint32_t parse_generation(std::string_view text) {
  std::uint32_t generation = 0;
  return parse(text, generation) ? generation : 0;
}

Facts shared_facts(const Options& options) {
  Facts facts{{"version", kVersionText}};
#define POSEIDON_AGREED(name) facts.emplace_back(#name, is_auto(options, #name) ? "auto" : text_of(options.name));
#include "poseidon/options.def"
  return facts;
}

std::string make_nonce() {
  std::array<std::byte, 8> bytes{};
  fill_with_random_bytes(bytes);
  return hexadecimal(bytes);
}

std::string digest_of(const Facts& facts) {
  constexpr std::size_t kBytes = 16;
  const Digest digest = sha256(bytes_of(lines_of(facts)));
  return hexadecimal(std::span(digest).first<kBytes>());
}

std::string to_text(const Entry& entry) {
  const Member& member = entry.member;
  return lines_of({{"generation", std::to_string(entry.generation)},
                   {"nonce", entry.nonce},
                   {"facts", entry.facts},
                   {"slot", std::to_string(member.slot)},
                   {"last_generation", std::to_string(member.last_generation)},
                   {"host_id", member.host_id},
                   {"host_name", member.host_name},
                   {"rack", member.rack},
                   {"server_addresses", joined(member.server_addresses)},
                   {"peer_address", member.peer_address},
                   {"server_shm_addresses", joined(member.server_shm_addresses)},
                   {"peer_shm_address", member.peer_shm_address}});
}

std::string to_text(const Entry& entry, const Facts& facts) { return to_text(entry) + lines_of(facts); }

Entry parse_entry(std::string_view text) {
  std::string_view rest = text;
  // Each process reads the entries of all. They are written in this order, so that each line is looked at once.
  const auto next = [text, &rest](std::string_view key) {
    const auto value = value_in(take_part(rest, '\n'), key);
    return value ? *value : value_of(text, key);
  };
  Entry entry;
  entry.generation = parse_generation(next("generation"));
  entry.nonce = next("nonce");
  entry.facts = next("facts");
  Member& member = entry.member;
  if (!parse(next("slot"), member.slot)) member.slot = -1;
  member.last_generation = parse_generation(next("last_generation"));
  member.host_id = next("host_id");
  member.host_name = next("host_name");
  member.rack = next("rack");
  member.server_addresses = split(next("server_addresses"));
  member.peer_address = next("peer_address");
  member.server_shm_addresses = split(next("server_shm_addresses"));
  member.peer_shm_address = next("peer_shm_address");
  return entry;
}

Status compare(const Options& options, int slot, std::string_view text, const Facts& facts) {
  for (const auto& [key, value] : facts) {
    if (const auto theirs = value_of(text, key); theirs != value)
      return {ErrorCode::mismatch, concat("ranks disagree on ", key, ": rank ", options.rank, " has ", value, ", rank ",
                                          slot, " has ", theirs, "; give all ranks the same value")};
  }
  return {};
}

std::string to_text(const Failure& failure) { return concat(failure.slot, " ", failure.nonce, " ", failure.why); }

Failure parse_failure(const std::string& text) {
  const std::size_t first = text.find(' ');
  const std::size_t second = first == std::string::npos ? first : text.find(' ', first + 1);
  Failure failure;
  if (second == std::string::npos || !parse(text.substr(0, first), failure.slot)) return {};
  failure.nonce = text.substr(first + 1, second - first - 1);
  failure.why = text.substr(second + 1);
  return failure;
}

std::string to_text(const Roster& roster) {
  std::string text = std::to_string(roster.generation);
  for (const auto& [slot, nonce] : roster.places) {
    text += ',';
    text += std::to_string(slot);
    text += ':';
    text += nonce;
  }
  return text;
}

Roster parse_roster(const std::string& text) {
  const std::vector<std::string> parts = split(text);
  if (parts.size() < 2) return {};
  Roster roster;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t colon = parts[i].find(':');
    int slot = 0;
    if (colon == std::string::npos || !parse(parts[i].substr(0, colon), slot)) return {};
    if (!roster.places.empty() && slot <= roster.places.back().first) return {};
    roster.places.emplace_back(slot, parts[i].substr(colon + 1));
  }
  roster.generation = parse_generation(parts.front());
  return roster;
}

std::string table_text(const Roster& roster, const std::vector<Entry>& entries) {
  std::string text = to_text(roster) + "\n";
  for (const auto& entry : entries) text += to_text(entry) + "\n";  // an empty line follows each entry
  return text;
}

std::vector<Entry> parse_table(std::string_view text, const Roster& roster) {
  const std::string head = to_text(roster) + "\n";
  if (!text.starts_with(head)) return {};
  std::vector<Entry> entries;
  for (std::size_t begin = head.size(); begin < text.size();) {
    const std::size_t end = text.find("\n\n", begin);
    if (end == std::string_view::npos) return {};
    entries.push_back(parse_entry(text.substr(begin, end + 1 - begin)));
    begin = end + 2;
  }
  if (entries.size() != roster.places.size()) return {};
  return entries;
}

}  // namespace poseidon
