#include "rendezvous/members.h"

#include <map>
#include <string_view>

#include "rendezvous/gathering.h"
#include "rendezvous/newcomers.h"
#include "rendezvous/published.h"

namespace poseidon {

namespace {

constexpr std::uint32_t kOnlyGeneration = 1;  // with OnFailure::abort

std::uint32_t stored_generation(Store& store, const std::string& job) {
  const auto wanted = store.get(generation_key(job), kQuickLook);
  return wanted.ok() ? parse_generation(wanted.value()) : 0;
}

}  // namespace

Status check_racks(const std::vector<Member>& members) {
  std::map<std::string_view, std::size_t> first_on;  // by machine: its first rank
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const Member& member = members[rank];
    if (member.rack.empty() != members[0].rack.empty())
      return {ErrorCode::invalid_argument,
              concat("rank ", member.rack.empty() ? member.slot : members[0].slot,
                     " has no rack and others have: give all workers one (rack), or none")};
    const std::size_t first = first_on.emplace(member.host_id, rank).first->second;
    if (members[first].rack != member.rack)
      return {ErrorCode::invalid_argument,
              concat("ranks ", members[first].slot, " and ", member.slot, " are on one machine, but in racks ",
                     members[first].rack, " and ", member.rack, "; give all workers of a machine the same rack")};
  }
  return {};
}

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
  if (stored_generation(store, job) > membership.generation) return false;
  const auto roster = store.get(roster_key(job), kQuickLook);
  return roster.ok() ? roster.value() == membership.roster : roster.status().code() != ErrorCode::timeout;
}

void want_generation(Store& store, const std::string& job, std::uint32_t generation) {
  if (stored_generation(store, job) < generation) (void)store.set(generation_key(job), std::to_string(generation));
}

void note_left(Store& store, const std::string& job, std::uint32_t generation, int slot) {
  (void)store.set(left_key(job, generation, slot), "1");
}

std::uint32_t generation_wanted(Store& store, const std::string& job) {
  answer_newcomers(store, job);
  return stored_generation(store, job);
}

std::string last_refused(Store& store, const std::string& job) {
  const auto refused = store.get(refused_key(job), kQuickLook);
  return refused.ok() ? refused.value() : "";
}

}  // namespace poseidon
