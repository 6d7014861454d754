#include "rendezvous/newcomers.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>
#include <vector>

#include "base/host.h"
#include "rendezvous/published.h"

namespace poseidon {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWriteAgain{200};
// How long newcomers wait, in hundredths of a sixth of their timeout. In a hundred of them the loss of a member has
// shown, whose replacement a newcomer may be. In ten of them the other processes of another job have come, too.
constexpr int kShareOfTimeout = 6;
constexpr int kRefuseAfter = 100;
constexpr int kAdmitAfter = 10;
constexpr int kAdmitInPlaceAfter = 100;  // of a process that came to a generation being formed, and answers nobody
constexpr int kAdmitBesideOthersAfter = 200;
constexpr int kMostSlots = 1 << 14;

/// What a newcomer writes: who it is, and how long it has waited.
struct Application {
  int slot = 0;
  std::string nonce;
  int waited = 0;
  std::string who;
};

template <typename T>
T number_in(std::string_view text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : T{};
}

/// Takes the text up to the next space off its beginning.
std::string_view take_word(std::string_view& text) {
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(std::min(word.size() + 1, text.size()));
  return word;
}

std::optional<Application> application_of(Store& store, const std::string& job, int slot) {
  const auto text = store.get(application_key(job, slot), kQuickLook);
  if (!text.ok() || text.value().empty()) return std::nullopt;
  std::string_view rest = text.value();
  Application application;
  application.slot = slot;
  application.nonce = take_word(rest);
  application.waited = number_in<int>(take_word(rest));
  application.who = rest;
  return application;
}

/// The slot's entry; its generation is 0 if there is none.
Entry claimed_entry(Store& store, const std::string& job, int slot) {
  const auto entry = store.get(member_key(job, slot), kQuickLook);
  return entry.ok() ? parse_entry(entry.value()) : Entry();
}

/// All that have no answer yet. One that was written again after its answer is taken away.
std::vector<Application> applications(Store& store, const std::string& job) {
  const auto slots = store.get(applied_key(job), kQuickLook);
  std::vector<Application> found;
  if (!slots.ok() || slots.value().empty()) return found;
  const int count = std::clamp(number_in<int>(slots.value()), 0, kMostSlots);
  for (int slot = 0; slot < count; ++slot) {
    auto application = application_of(store, job, slot);
    if (!application) continue;
    if (claimed_entry(store, job, slot).nonce == application->nonce)
      (void)store.set(application_key(job, slot), "");
    else
      found.push_back(std::move(*application));
  }
  if (found.empty()) (void)store.set(applied_key(job), "");
  return found;
}

/// The results of writing do not matter: a newcomer without an answer asks again.
void admit(Store& store, const std::string& job, const Application& one, std::uint32_t generation) {
  (void)store.set(answer_key(job, one.slot), concat(one.nonce, " yes ", generation));
  (void)store.set(application_key(job, one.slot), "");
}

void refuse(Store& store, const std::string& job, const Application& one, const std::string& why) {
  (void)store.set(answer_key(job, one.slot), one.nonce + " no " + why);
  (void)store.set(application_key(job, one.slot), "");
  (void)store.set(refused_key(job), one.who + " was refused: " + why);
}

/// What a newcomer is told whose slot is `taken`: "lives", or why else it cannot have it.
std::string refusal(const std::string& job, int slot, const std::string& taken) {
  return concat("job '", job, "' goes on at this address, and its rank ", slot, " ", taken,
                "; if this is another job, give it another MASTER_PORT or another name with POSEIDON_JOB");
}

}  // namespace

Newcomer::Newcomer(Store& store, const Options& options, std::string nonce, bool is_known)
    : store_(store), options_(options), nonce_(std::move(nonce)), is_known_(is_known) {}

Result<bool> Newcomer::may_claim(const Get& get, std::uint32_t& generation) {
  one_thread_.check();
  if (is_known_ && options_.run.empty()) return true;
  const auto is_away = [](const Result<std::string>& text) {
    return !text.ok() && text.status().code() != ErrorCode::timeout;
  };
  const auto run = get(run_key(options_.job));
  if (is_away(run)) return false;
  const std::string theirs = run.ok() ? run.value() : "";
  if (!theirs.empty() && !options_.run.empty()) {
    if (theirs == options_.run) return true;
    return other_run(theirs);
  }
  if (!is_known_) {
    const auto roster = get(roster_key(options_.job));
    if (is_away(roster)) return false;
    const bool goes_on = roster.ok() && parse_roster(roster.value()).generation > 0;
    // With OnFailure::abort the store of torch.distributed may have the roster of this program's own earlier job.
    if (goes_on && options_.on_failure != OnFailure::abort) return apply(get, generation);
    is_known_ = true;  // the roster that comes next may have this process
  }
  if (options_.run.empty()) return true;
  // The next look shows whether another run has written at the same time.
  (void)store_.set(run_key(options_.job), options_.run);
  return false;
}

Result<bool> Newcomer::apply(const Get& get, std::uint32_t& generation) {
  const auto now = Clock::now();
  if (!applied_at_) {
    applied_at_ = now;
    write_application(now);
  }
  const auto answer = get(answer_key(options_.job, options_.rank));
  std::string_view rest = answer.ok() ? std::string_view(answer.value()) : std::string_view();
  if (take_word(rest) == nonce_) {
    if (take_word(rest) != "yes") return Status(ErrorCode::refused, std::string(rest));
    generation = std::max(generation, number_in<std::uint32_t>(rest));
    is_known_ = true;
    applied_at_.reset();
    return true;
  }
  if (now - written_at_ >= kWriteAgain) write_application(now);
  return false;
}

void Newcomer::write_application(Clock::time_point now) {
  written_at_ = now;
  const auto waited = 100 * kShareOfTimeout * (now - *applied_at_) / std::max(options_.timeout, milliseconds(1));
  (void)store_.set(application_key(options_.job, options_.rank), concat(nonce_, " ", waited, " ", own_name()));
  (void)store_.set(applied_key(options_.job), std::to_string(options_.world_size));
}

Status Newcomer::other_run(const std::string& theirs) {
  const std::string why = concat("job '", options_.job, "' at ", options_.master_addr, ":", options_.master_port,
                                 " is another run (", theirs, ", and this process is of ", options_.run,
                                 "), which has that address; give this run another MASTER_PORT, or end the other one");
  (void)store_.set(refused_key(options_.job), own_name() + " was refused: it is of another run, " + options_.run +
                                                  "; give that run another MASTER_PORT");
  return {ErrorCode::refused, why};
}

std::string Newcomer::own_name() const {
  return concat("a process on ", host_name(), ", started as rank ", options_.rank, " of ", options_.world_size, ",");
}

void answer_newcomers(Store& store, const std::string& job) {
  const auto all = applications(store, job);
  if (all.empty()) return;
  const auto text = store.get(roster_key(job), kQuickLook);
  const Roster roster = text.ok() ? parse_roster(text.value()) : Roster();
  if (roster.generation == 0) return;
  const auto lives = [&roster](const Application& one) {
    return std::ranges::any_of(roster.places, [&](const auto& place) { return place.first == one.slot; });
  };
  const bool besides = std::ranges::any_of(all, lives);
  const bool strangers =
      std::ranges::any_of(all, [&](const Application& one) { return lives(one) && one.waited >= kRefuseAfter; });
  for (const Application& one : all) {
    if (strangers && one.waited >= kAdmitAfter) {
      refuse(store, job, one,
             refusal(job, one.slot,
                     lives(one) ? "lives" : "is asked for by one of several new processes while other members live"));
    } else if (!lives(one) && one.waited >= (besides ? kAdmitBesideOthersAfter : kAdmitAfter)) {
      admit(store, job, one, roster.generation + 1);
    }
  }
}

void admit_newcomers(Store& store, const std::string& job, std::uint32_t generation, int own_slot) {
  for (const Application& one : applications(store, job)) {
    if (claimed_entry(store, job, one.slot).generation < generation)
      admit(store, job, one, generation);
    else if (one.slot == own_slot)
      refuse(store, job, one, refusal(job, own_slot, "lives"));
    else if (one.waited >= kAdmitInPlaceAfter)
      admit(store, job, one, generation + 1);
  }
}

}  // namespace poseidon
