#include "rendezvous/gathering.h"

#include <algorithm>
#include <utility>

#include "base/thread.h"
#include "rendezvous/store_protocol.h"

namespace poseidon {

namespace {

using std::chrono::milliseconds;

// A process may find its slot taken by the entry of its predecessor, and by its own entry from an earlier attempt. If
// this happens more often, the entry is from another living process, and one of the two has to end before both run out
// of time. With a limit of 16, two processes went on for ever if the timeout was as short as 20 looks at the store.
constexpr int kMostDisplacements = 4;
// Members come to their slots within this time, if no step is under way. Then newcomers may have those that are left.
constexpr milliseconds kMembersFirst{250};
constexpr std::uint32_t kLostGenerations = 100;  // more generations than a lost store may have known without telling

constexpr auto kFarewell = std::chrono::seconds(2);
// With OnFailure::abort, the wait for a store that is away before all have met: rank 0 may begin again and serve a new
// one.
constexpr auto kStorePatience = std::chrono::seconds(15);

/// With OnFailure::shrink, the time for which nobody new must have come before the present processes go on.
milliseconds window_of(const Options& options) {
  const auto window = std::clamp(options.timeout / 60, milliseconds(500), milliseconds(5000));
  return std::min(window, options.timeout / 6);
}

/// Whether the process was in no generation of the job so far.
bool is_new(const Entry& entry) { return entry.member.last_generation == 0; }

/// The time between looks at the store. It grows with the number of processes, because the store serves all of them.
milliseconds pause_of(const Options& options) {
  return std::clamp(milliseconds(options.world_size / 2), milliseconds(5), milliseconds(100));
}

}  // namespace

Gathering::Gathering(Store& store, const Options& options, const Member& mine, std::uint32_t at_least)
    : store_(store),
      options_(options),
      facts_(shared_facts(options)),
      mine_{std::max(at_least, mine.last_generation + 1), make_nonce(), digest_of(facts_), mine},
      newcomer_(store, options, mine_.nonce, mine.last_generation > 0 || at_least > 1),
      known_generation_(mine_.generation - 1),
      deadline_(Clock::now() + options.timeout),
      window_(window_of(options)),
      leader_patience_(window_),
      begun_(Clock::now()),
      answered_(Clock::now()),
      last_arrival_(Clock::now()) {}

Result<Membership> Gathering::run(const std::function<bool()>& keep_waiting) {
  one_thread_.check();
  auto membership = gather(keep_waiting);
  if (!membership.ok()) leave(membership.status());
  return membership;
}

Result<Membership> Gathering::gather(const std::function<bool()>& keep_waiting) {
  for (;;) {
    auto found = look();
    if (!found.ok()) return found.status();
    if (found.value()) return std::move(*found.value());
    if (!keep_waiting()) return Status(ErrorCode::aborted, "interrupted while waiting for the other ranks");
    if (Clock::now() > deadline_) return missing();
    if (options_.on_failure == OnFailure::abort && Clock::now() - answered_ > kStorePatience) return away_;
    pause_for(pause_of(options_));
  }
}

/// Tells the others why. Rank 0's store ends with its process, so rank 0 waits a moment for them.
void Gathering::leave(const Status& why) {
  if (newcomer_.waits() || why.code() == ErrorCode::refused) return;  // the job is others'
  // A rank without a store cannot tell anyone, so the results of these calls do not matter.
  (void)quick_get(generation_key(options_.job));
  if (!away_.ok()) return;
  const int slot = mine_.member.slot;
  const Failure failure{slot, mine_.nonce, concat("rank ", slot, ": ", why.message())};
  const auto left = [&](int rank) { return left_key(options_.job, mine_.generation, rank); };
  // A process that ends because of another's failure does not replace the first message.
  if (failure_of_another().ok()) (void)store_.set(failure_key(options_.job, mine_.generation), to_text(failure));
  (void)store_.set(left(slot), "1");
  if (slot != 0) return;
  const auto deadline = Clock::now() + kFarewell;
  for (int rank = 1; rank < options_.world_size && Clock::now() < deadline; ++rank)
    (void)store_.get(left(rank), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

Result<std::optional<Membership>> Gathering::look() {
  const std::optional<Membership> not_yet;
  const auto may = may_claim();
  if (!may.ok()) return may.status();
  if (!may.value()) return not_yet;
  const auto wanted = quick_get(generation_key(options_.job));
  if (!away_.ok()) return not_yet;
  const std::uint32_t stored = wanted.ok() ? parse_generation(wanted.value()) : 0;
  if (stored > mine_.generation) move_to(stored);
  // The store has lost its content, and with it the members of the generations that it knew. Some processes may go on
  // in one of those without this process. Its number is not used again, so they see that another generation is wanted.
  const bool lost = options_.on_failure == OnFailure::shrink && stored < known_generation_;
  if (lost && mine_.generation < known_generation_ + kLostGenerations) move_to(known_generation_ + kLostGenerations);
  known_generation_ = std::max(known_generation_, stored);
  // The next look shows whether this, and everything else that is written here, has arrived.
  if (stored < mine_.generation) (void)store_.set(generation_key(options_.job), std::to_string(mine_.generation));
  const auto claimed = claim();
  if (!claimed.ok()) return claimed.status();
  if (!claimed.value()) return not_yet;
  if (options_.on_failure != OnFailure::abort && Clock::now() - begun_ >= kMembersFirst)
    admit_newcomers(store_, options_.job, mine_.generation, mine_.member.slot);
  if (Status status = failure_of_another(); !status.ok()) return status;
  const auto text = quick_get(roster_key(options_.job));
  if (!away_.ok()) return not_yet;
  const Roster roster = text.ok() ? parse_roster(text.value()) : Roster();
  if (roster.generation == mine_.generation) return join(roster);
  has_roster_ = roster.generation > 0;
  last_slots_.clear();
  for (const auto& [slot, nonce] : roster.places)
    if (options_.on_failure != OnFailure::shrink || arrivals_.contains(slot) ||
        !quick_get(left_key(options_.job, roster.generation, slot)).ok())
      last_slots_.push_back(slot);
  if (Status status = see_arrivals(); !status.ok()) return status;
  if (const auto written = lead()) return join(*written);
  return not_yet;
}

/// Whether this process may have its slot: it is of this run, or has been admitted.
Result<bool> Gathering::may_claim() {
  std::uint32_t generation = mine_.generation;
  auto may = newcomer_.may_claim([this](const std::string& key) { return quick_get(key); }, generation);
  if (generation > mine_.generation) move_to(generation);
  return may;
}

/// The key's present value. Notes whether the store answers.
Result<std::string> Gathering::quick_get(const std::string& key) {
  auto value = store_.get(key, kQuickLook);
  away_ = value.ok() || value.status().code() == ErrorCode::timeout ? Status() : value.status();
  if (away_.ok()) answered_ = Clock::now();
  return value;
}

/// The entry of the slot in this generation.
std::optional<Entry> Gathering::entry_of(int slot, std::string* text) {
  auto found = quick_get(member_key(options_.job, slot));
  if (!found.ok()) return std::nullopt;
  Entry entry = parse_entry(found.value());
  if (entry.generation != mine_.generation) return std::nullopt;
  if (text != nullptr) *text = std::move(found.value());
  return entry;
}

void Gathering::move_to(std::uint32_t generation) {
  mine_.generation = generation;
  arrivals_.clear();
  last_arrival_ = Clock::now();
  complete_since_.reset();
}

/// Makes this process have its slot in this generation. Returns false if it cannot have it in this one, or not yet.
Result<bool> Gathering::claim() {
  const int slot = mine_.member.slot;
  const auto text = quick_get(member_key(options_.job, slot));
  if (!away_.ok()) return false;
  const Entry there = text.ok() ? parse_entry(text.value()) : Entry();
  if (there.nonce == mine_.nonce && there.generation == mine_.generation) return true;
  // A new process may find its predecessor's entry. A survivor may find its own entry, from now or from an earlier try.
  // Any other entry belongs to a process that was started to replace this one, or by mistake.
  const std::uint32_t last = mine_.member.last_generation;
  const bool replaced = last > 0 && there.generation > last && there.member.last_generation != last;
  if (!replaced && (there.nonce == mine_.nonce || there.generation < mine_.generation)) {
    const Status status = store_.set(member_key(options_.job, slot), to_text(mine_, facts_));
    if (status.code() == ErrorCode::refused) return status;  // the store is full and stays full
    return true;
  }
  if (!replaced && ++displaced_count_ < kMostDisplacements) {
    move_to(there.generation + 1);
    return false;
  }
  return Status(ErrorCode::aborted,
                concat("rank ", slot, " of job '", options_.job, "' is another process now (in generation ",
                       there.generation, "), so this one ends; see whether two were started with the same RANK"));
}

/// With OnFailure::abort, why a process of this generation has given up. Ok if none has, or if it has begun again
/// since.
Status Gathering::failure_of_another() {
  if (options_.on_failure != OnFailure::abort) return {};
  const auto text = quick_get(failure_key(options_.job, mine_.generation));
  if (!text.ok()) return {};
  const Failure failure = parse_failure(text.value());
  if (failure.slot < 0 || failure.slot == mine_.member.slot) return {};
  const auto entry = entry_of(failure.slot);
  if (!entry || entry->nonce != failure.nonce) return {};
  return {ErrorCode::aborted, failure.why};
}

/// Looks for processes that have not come so far: for all of them if this process may have to lead, otherwise only for
/// the leader. So no process has to wait for the others to learn that it does not fit the first one.
Status Gathering::see_arrivals() {
  const bool may_lead = options_.on_failure == OnFailure::shrink || mine_.member.slot == 0;
  if (!may_lead && options_.on_failure == OnFailure::rejoin && !is_new(mine_)) return {};
  for (int slot = 0; slot < (may_lead ? options_.world_size : 1); ++slot) {
    if (arrivals_.contains(slot)) continue;
    std::string text;
    const auto entry = entry_of(slot, &text);
    if (!entry) continue;
    if (options_.on_failure == OnFailure::abort) {
      if (Status status = compare(options_, slot, text, facts_); !status.ok()) return status;
    } else if (is_new(*entry) != is_new(mine_)) {
      // A newcomer that does not fit the members must not end their job: it ends, and they do not see it.
      Status status = fits(slot, *entry);
      if (!status.ok() && is_new(mine_)) return status;
      if (!status.ok()) continue;
    }
    arrivals_[slot] = entry->member.last_generation;
    last_arrival_ = Clock::now();
  }
  return {};
}

/// Whether a process that came and this one can be in one job.
Status Gathering::fits(int slot, const Entry& entry) {
  if (entry.facts != mine_.facts) return difference(slot);
  return check_racks({mine_.member, entry.member});
}

bool Gathering::complete_enough() const {
  const auto count = static_cast<int>(arrivals_.size());
  if (count == options_.world_size) return true;
  if (options_.on_failure != OnFailure::shrink || count < options_.min_workers) return false;
  const auto now = Clock::now();
  // A job that begins waits for all processes up to the timeout, unless it was said how many are enough. Later, a
  // process that does not come soon has been lost.
  const bool going_on = std::ranges::any_of(arrivals_, [](const auto& arrival) { return arrival.second > 0; });
  if (!going_on) {
    // Newcomers never begin beside members that the store knows: those come at the end of their step. And where rank 0
    // does not come, it has perhaps ended a job that others just have missed.
    if (has_roster_ || !arrivals_.contains(0)) return false;
    return now - last_arrival_ >= window_ && (options_.min_workers > 0 || now >= deadline_ - options_.timeout / 10);
  }
  // Nobody is missing if all of the last generation have come, as when a worker joins: who asks to be taken in does so
  // before they meet.
  const auto came = [this](int slot) { return arrivals_.contains(slot); };
  if (!last_slots_.empty() && std::ranges::all_of(last_slots_, came) && now - last_arrival_ >= kMembersFirst)
    return true;
  if (now - last_arrival_ < window_) return false;
  // Survivors without which the last generation was formed wait for its members, who come at the end of their step. So
  // they do not become a second job beside those, unless all of those have died.
  const bool a_member_came = last_slots_.empty() || std::ranges::any_of(last_slots_, came);
  return a_member_came || now >= deadline_ - options_.timeout / 2;
}

/// Writes the roster if it is this process's turn, and returns it then.
std::optional<Roster> Gathering::lead() {
  if (!complete_enough()) {
    complete_since_.reset();
    return std::nullopt;
  }
  if (arrivals_.begin()->first < mine_.member.slot) {
    if (!complete_since_) complete_since_ = Clock::now();
    // The process that has to write it came and died. It will not be in the next generation.
    if (Clock::now() - *complete_since_ > leader_patience_) {
      leader_patience_ *= 2;  // it may only be slower than this process
      move_to(mine_.generation + 1);
    }
    return std::nullopt;
  }
  Roster roster;
  roster.generation = mine_.generation;
  std::vector<Entry> entries;
  for (const auto& [slot, last_generation] : arrivals_) {
    auto entry = entry_of(slot);
    if (!entry) {
      // That process has moved on, or the store has lost its content.
      arrivals_.erase(slot);
      return std::nullopt;
    }
    roster.places.emplace_back(slot, entry->nonce);
    entries.push_back(std::move(*entry));
  }
  (void)store_.set(table_key(options_.job), table_text(roster, entries));  // before the roster, which decides
  if (!store_.set(roster_key(options_.job), to_text(roster)).ok()) return std::nullopt;
  return roster;
}

/// Takes part in the roster's generation. Returns nullopt if this process has to try the next one.
Result<std::optional<Membership>> Gathering::join(const Roster& roster) {
  const auto place = std::ranges::find(roster.places, std::pair(mine_.member.slot, mine_.nonce));
  if (place == roster.places.end()) {
    move_to(mine_.generation + 1);
    return std::optional<Membership>();
  }
  Membership membership;
  membership.generation = mine_.generation;
  membership.rank = static_cast<int>(place - roster.places.begin());
  membership.run = roster.places.front().second;
  membership.roster = to_text(roster);
  std::vector<Entry> entries = entries_of(roster);
  if (!away_.ok()) return std::optional<Membership>();
  bool going_on = false;
  for (std::size_t i = 0; i < roster.places.size(); ++i) {
    const auto& [slot, nonce] = roster.places[i];
    Entry entry = i < entries.size() ? std::move(entries[i]) : Entry();
    if (entry.generation != mine_.generation || entry.nonce != nonce) {
      move_to(mine_.generation + 1);
      return std::optional<Membership>();
    }
    if (entry.facts != mine_.facts) return difference(slot);
    going_on |= !is_new(entry);
    membership.members.push_back(std::move(entry.member));
  }
  if (Status status = check_racks(membership.members); !status.ok()) return status;
  membership.joining = going_on && is_new(mine_);
  return std::optional(std::move(membership));
}

/// Says in what a slot's facts differ from this process's.
Status Gathering::difference(int slot) {
  std::string text;
  static_cast<void>(entry_of(slot, &text));
  if (Status status = compare(options_, slot, text, facts_); !text.empty() && !status.ok()) return status;
  return {ErrorCode::mismatch, concat("the options of rank ", options_.rank, " differ from those of rank ", slot,
                                      "; give all ranks the same values")};
}

/// Takes the entries from the roster's table, and one by one if the store has lost it. Stops if the store is away.
std::vector<Entry> Gathering::entries_of(const Roster& roster) {
  const auto table = quick_get(table_key(options_.job));
  std::vector<Entry> entries = table.ok() ? parse_table(table.value(), roster) : std::vector<Entry>();
  if (!entries.empty() || !away_.ok()) return entries;
  for (const auto& [slot, nonce] : roster.places) {
    const auto text = quick_get(member_key(options_.job, slot));
    if (!away_.ok()) return {};
    entries.push_back(text.ok() ? parse_entry(text.value()) : Entry());
  }
  return entries;
}

Status Gathering::missing() {
  const std::string waited = concat("rank ", mine_.member.slot, " waited ", options_.timeout.count(), " ms");
  if (!away_.ok())
    return {ErrorCode::timeout,
            concat(waited, " in generation ", mine_.generation, " for the others: ", away_.message(),
                   "; if the process that serves the store is stopped, end it and start it again")};
  if (newcomer_.waits())
    return {ErrorCode::timeout,
            concat(waited, " for the members of job '", options_.job, "', which goes on at this address, to take it in",
                   "; if this is another job, give it another MASTER_PORT; if it replaces a member, "
                   "raise POSEIDON_TIMEOUT above the time of a step")};
  if (has_roster_ && is_new(mine_) && options_.on_failure == OnFailure::shrink)
    return {ErrorCode::timeout,
            concat(waited, " for the members of job '", options_.job,
                   "', which has begun without it, to take it in; "
                   "if they have ended, there is nothing to join: start the job again with another MASTER_PORT or "
                   "another name (POSEIDON_JOB); if their steps are longer, raise POSEIDON_TIMEOUT")};
  std::string slots;
  for (int slot = 0; slot < options_.world_size; ++slot)
    if (slot != mine_.member.slot && !entry_of(slot)) slots += (slots.empty() ? "" : ", ") + std::to_string(slot);
  if (options_.on_failure == OnFailure::abort)
    return {ErrorCode::timeout,
            concat(waited, " for rank ", slots.empty() ? "0" : slots, " of ", options_.world_size,
                   ", which never arrived; check that every rank was started with the same MASTER_ADDR, "
                   "MASTER_PORT and WORLD_SIZE, or raise POSEIDON_TIMEOUT",
                   with_another_secret())};
  const std::string who = slots.empty() ? "lower than its own, which decides who takes part" : slots;
  const std::string least = options_.on_failure == OnFailure::shrink
                                ? concat(" and goes on with no fewer than ", std::max(1, options_.min_workers))
                                : "";
  return {ErrorCode::timeout,
          concat(waited, " in generation ", mine_.generation, " for rank ", who, " of ", options_.world_size, least,
                 ", which did not come; see that lost ranks are started again with the same RANK, "
                 "MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
                 "or raise POSEIDON_TIMEOUT",
                 with_another_secret())};
}

/// Who was not let in, as it is perhaps who is missing.
std::string Gathering::with_another_secret() {
  const auto last = quick_get(store_protocol::kOtherSecretKey);
  return last.ok() ? "; a process at " + last.value() +
                         " came with another secret or without one and was refused: give all processes the same "
                         "POSEIDON_SECRET or secret_file"
                   : "";
}

}  // namespace poseidon
