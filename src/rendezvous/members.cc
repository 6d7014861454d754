#include "rendezvous/members.h"

#include <utility>

#include "base/clock.h"
#include "rendezvous/gathering.h"
#include "rendezvous/published.h"

namespace poseidon {

namespace {

using std::chrono::milliseconds;

constexpr auto kSlice = milliseconds(200);
constexpr auto kQuickLook = milliseconds(0);
constexpr auto kFarewell = std::chrono::seconds(2);
constexpr std::uint32_t kOnlyGeneration = 1;  // with OnFailure::abort

std::string failed_key(const std::string& job) { return "poseidon/" + job + "/failed"; }

Status missing(Store& store, const Options& options, int first) {
  std::string ranks;
  for (int rank = first; rank < options.world_size; ++rank)
    if (!store.get(member_key(options.job, rank), kQuickLook).ok())
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return {ErrorCode::timeout, "rank " + std::to_string(options.rank) + " waited " +
                                  std::to_string(options.timeout.count()) + " ms for rank " + ranks + " of " +
                                  std::to_string(options.world_size) +
                                  ", which never arrived; check that every rank was started with the same MASTER_ADDR, "
                                  "MASTER_PORT and WORLD_SIZE, or raise POSEIDON_TIMEOUT"};
}

/// Waits for one rank's text, and fails as soon as any rank says that it has failed.
Result<std::string> await_member(Store& store, const Options& options, int rank, Clock::time_point deadline,
                                 const std::function<bool()>& keep_waiting) {
  for (;;) {
    auto text = store.get(member_key(options.job, rank), kSlice);
    if (text.ok() || text.status().code() != ErrorCode::timeout) return text;
    if (auto failed = store.get(failed_key(options.job), kQuickLook); failed.ok())
      return Status(ErrorCode::aborted, failed.value());
    if (!keep_waiting()) return Status(ErrorCode::aborted, "interrupted while waiting for the other ranks");
    if (Clock::now() > deadline) return missing(store, options, rank);
  }
}

/// All ranks, of whom none may be lost.
Result<Membership> gather_once(Store& store, const Options& options, const Member& mine,
                               const std::function<bool()>& keep_waiting) {
  const auto deadline = Clock::now() + options.timeout;
  const Facts facts = shared_facts(options);
  const Entry own{kOnlyGeneration, make_nonce(), mine};
  if (Status status = store.set(member_key(options.job, options.rank), to_text(own, facts)); !status.ok())
    return status;
  Membership membership;
  membership.generation = kOnlyGeneration;
  membership.rank = options.rank;
  for (int rank = 0; rank < options.world_size; ++rank) {
    auto text = await_member(store, options, rank, deadline, keep_waiting);
    if (!text.ok()) return text.status();
    if (Status status = compare(options, rank, text.value(), facts); !status.ok()) return status;
    Entry entry = parse_entry(text.value());
    membership.members.push_back(std::move(entry.member));
    if (rank == 0) membership.run = std::move(entry.nonce);
  }
  return membership;
}

/// Lets the others learn why: rank 0's store ends with its process, so it waits a moment for them.
void leave_failed(Store& store, const Options& options, const Status& why) {
  const auto left = [&](int rank) { return "poseidon/" + options.job + "/left/" + std::to_string(rank); };
  // A rank whose store is gone cannot tell anyone, and what becomes of these calls changes nothing.
  if (const auto look = store.get(left(options.rank), kQuickLook);
      !look.ok() && look.status().code() != ErrorCode::timeout)
    return;
  (void)store.set(failed_key(options.job), "rank " + std::to_string(options.rank) + ": " + why.message());
  (void)store.set(left(options.rank), "1");
  if (options.rank != 0) return;
  const auto deadline = Clock::now() + kFarewell;
  for (int rank = 1; rank < options.world_size && Clock::now() < deadline; ++rank)
    (void)store.get(left(rank), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

}  // namespace

Result<Membership> meet(Store& store, const Options& options, const Member& mine,
                        const std::function<bool()>& keep_waiting, std::uint32_t at_least) {
  Member member = mine;
  member.slot = options.rank;
  member.last_generation = options.generation;
  auto membership = options.on_failure == OnFailure::abort
                        ? gather_once(store, options, member, keep_waiting)
                        : Gathering(store, options, member, at_least).run(keep_waiting);
  if (!membership.ok()) leave_failed(store, options, membership.status());
  return membership;
}

bool stands(Store& store, const std::string& job, const Membership& membership) {
  if (generation_wanted(store, job) > membership.generation) return false;
  const auto roster = store.get(roster_key(job), kQuickLook);
  return roster.ok() ? roster.value() == membership.roster : roster.status().code() != ErrorCode::timeout;
}

void want_generation(Store& store, const std::string& job, std::uint32_t generation) {
  if (generation_wanted(store, job) < generation) (void)store.set(generation_key(job), std::to_string(generation));
}

std::uint32_t generation_wanted(Store& store, const std::string& job) {
  const auto wanted = store.get(generation_key(job), kQuickLook);
  return wanted.ok() ? parse_generation(wanted.value()) : 0;
}

}  // namespace poseidon
