#include "rendezvous/members.h"

#include <chrono>

#include "rendezvous/gathering.h"
#include "rendezvous/published.h"

namespace poseidon {

namespace {

constexpr auto kQuickLook = std::chrono::milliseconds(0);
constexpr std::uint32_t kOnlyGeneration = 1;  // with OnFailure::abort

}  // namespace

Result<Membership> meet(Store& store, const Options& options, const Member& mine,
                        const std::function<bool()>& keep_waiting, std::uint32_t at_least) {
  const bool may_go_on = options.on_failure != OnFailure::abort;
  Member member = mine;
  member.slot = options.rank;
  member.last_generation = may_go_on ? options.generation : 0;
  auto membership = Gathering(store, options, member, at_least).run(keep_waiting);
  if (membership.ok() && !may_go_on) {
    // The job does not depend on how often its processes have met in this store.
    membership.value().generation = kOnlyGeneration;
    membership.value().roster.clear();
  }
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
