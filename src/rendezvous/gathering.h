// Gathering: how the members of a job's next generation find each other (docs/decisions/0016-generations.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/one_thread.h"
#include "poseidon/options.h"
#include "poseidon/store.h"
#include "rendezvous/members.h"
#include "rendezvous/newcomers.h"
#include "rendezvous/published.h"

namespace poseidon {

/// One process's side of a gathering. The lowest slot that has come writes the roster, and the roster decides. The
/// store may lose its content at any time, when the process that serves it is replaced. Then every process writes again
/// what is missing of its own. One thread uses it, once.
class Gathering {
 public:
  Gathering(Store& store, const Options& options, const Member& mine, std::uint32_t at_least);

  Result<Membership> run(const std::function<bool()>& keep_waiting);

 private:
  Result<Membership> gather(const std::function<bool()>& keep_waiting);
  void leave(const Status& why);
  Result<std::optional<Membership>> look();
  Result<std::string> quick_get(const std::string& key);
  std::optional<Entry> entry_of(int slot, std::string* text = nullptr);
  void move_to(std::uint32_t generation);
  Result<bool> may_claim();
  Result<bool> claim();
  Status failure_of_another();
  Status see_arrivals();
  Status fits(int slot, const Entry& entry);
  bool complete_enough() const;
  std::optional<Roster> lead();
  Result<std::optional<Membership>> join(const Roster& roster);
  Status difference(int slot);
  std::vector<Entry> entries_of(const Roster& roster);
  Status missing();
  std::string with_another_secret();

  Store& store_;
  const Options& options_;
  const Facts facts_;
  Entry mine_;  // its generation rises if others ask for later ones
  Newcomer newcomer_;
  std::uint32_t known_generation_;  // the highest generation seen in the store
  const Clock::time_point deadline_;
  const std::chrono::milliseconds window_;
  std::chrono::milliseconds leader_patience_;
  bool has_roster_ = false;      // the store knows members
  std::vector<int> last_slots_;  // their slots, without those that have left in order
  Status away_;                  // why the store did not answer the last time; ok: it answered
  const Clock::time_point begun_;
  Clock::time_point answered_;  // when the store answered the last time
  int displaced_count_ = 0;
  // Of this generation:
  std::map<int, std::uint32_t> arrivals_;  // each slot's last generation; only processes that may lead keep it
  Clock::time_point last_arrival_;
  std::optional<Clock::time_point> complete_since_;
  [[no_unique_address]] OneThread one_thread_{"Gathering"};
};

}  // namespace poseidon
