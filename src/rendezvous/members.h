// Members: every rank tells the others its addresses and options, and checks theirs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Where one worker listens. An address may consist of several, joined by '|': one for each network transport in use.
struct Member {
  std::string host_id;                        // equal for processes that can share memory
  std::vector<std::string> server_addresses;  // of its embedded server, by core; empty with dedicated servers
  std::string peer_address;                   // where peers send factors
  // The same for shared memory; empty if this process does not offer it.
  std::vector<std::string> server_shm_addresses;
  std::string peer_shm_address;
  std::string host_name{};  // for messages
  std::string rack{};       // Options::rack
  // meet() fills in the following.
  int slot = 0;                       // the rank with which it was started
  std::uint32_t last_generation = 0;  // the last generation of which it was part; 0: it is new
};

/// Who takes part in a generation of the job.
struct Membership {
  std::uint32_t generation = 1;
  int rank = 0;                 // this process's place in `members`
  std::vector<Member> members;  // by rank, in the order of their slots
  bool joining = false;         // this process is new, and others are not
  std::string run{};            // equal for all members; each meeting makes another one
  std::string roster{};         // the text in the store; empty with OnFailure::abort
};

/// ErrorCode::invalid_argument: some members have no rack and others have, or those of one machine have different ones.
Status check_racks(const std::vector<Member>& members);

/// Publishes `mine`, waits for the others and returns who takes part: all ranks or, with OnFailure::shrink, those that
/// came. The generation is at least `at_least`. Blocks up to options.timeout; for `keep_waiting` see Client::connect.
/// ErrorCode::timeout names the ranks that did not come. ErrorCode::mismatch names the rank and the option in which it
/// differs (version, world_size, chunk_bytes, …). ErrorCode::aborted: another process has this one's slot.
Result<Membership> meet(Store& store, const Options& options, const Member& mine,
                        const std::function<bool()>& keep_waiting, std::uint32_t at_least = 1);

/// Whether the membership still holds according to the store: nobody wants a later one, and the store still has its
/// roster. Does not wait.
bool stands(Store& store, const std::string& job, const Membership& membership);

/// Writes to the store that this generation, or a later one, is wanted. It does not report whether the store took it.
void want_generation(Store& store, const std::string& job, std::uint32_t generation);

}  // namespace poseidon
