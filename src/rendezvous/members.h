// Members: every rank tells the others where it listens and what it believes, and checks theirs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Where one worker listens. An address may be several, joined by '|': one for each network transport in use.
struct Member {
  std::string host_id;                        // equal for processes that can share memory
  std::vector<std::string> server_addresses;  // of its embedded server, by core; none with dedicated servers
  std::string peer_address;                   // for factors
  // The same in shared memory; empty where this process does not offer it.
  std::vector<std::string> server_shm_addresses;
  std::string peer_shm_address;
  std::string host_name{};  // for people
  // Filled in by meet():
  int slot = 0;                       // the rank that it was started with
  std::uint32_t last_generation = 0;  // that it was part of; 0: it is new
};

/// Who takes part in a generation of the job.
struct Membership {
  std::uint32_t generation = 1;
  int rank = 0;                 // this process's place in `members`
  std::vector<Member> members;  // by rank, in the order of their slots
  bool joining = false;         // this process is new, and others are not
  std::string run{};            // equal for all members, another one each time that they meet
  std::string roster{};         // as the store has it; empty with OnFailure::abort
};

/// Publishes `mine`, waits for the others and returns who takes part: all ranks or, with OnFailure::shrink, those that
/// came. A generation lower than `at_least` is not taken. Fails with timeout naming the ranks that did not come, with
/// mismatch naming the rank and the option in which it differs (version, world_size, chunk_bytes, …), or, where another
/// process has this one's slot, with aborted. Blocks up to options.timeout; `keep_waiting` as in Client::connect.
Result<Membership> meet(Store& store, const Options& options, const Member& mine,
                        const std::function<bool()>& keep_waiting, std::uint32_t at_least = 1);

/// Whether the membership still holds as far as the store says: nobody wants a later one, and the store's content is
/// still there. A quick look.
bool stands(Store& store, const std::string& job, const Membership& membership);

/// Says in the store that this generation, or a later one, is wanted. Whether that worked shows in its effects only.
void want_generation(Store& store, const std::string& job, std::uint32_t generation);

}  // namespace poseidon
