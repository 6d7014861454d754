// Newcomers: which processes may take part in a job that goes on (docs/decisions/0055-runs.md).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/one_thread.h"
#include "poseidon/options.h"
#include "poseidon/status.h"
#include "poseidon/store.h"

namespace poseidon {

/// One process's side: whether it may claim its slot. A process that the launcher's identity shows to be of the same
/// run may, and so may all processes of a job that begins. Any other has to be admitted by the members. One thread uses
/// it.
class Newcomer {
 public:
  /// `nonce` is that of the process's entry. `is_known`: it is a member, or was admitted before.
  Newcomer(Store& store, const Options& options, std::string nonce, bool is_known);

  /// Reads a key's present value without waiting.
  using Get = std::function<Result<std::string>(const std::string& key)>;
  /// Returns whether it may claim its slot; false: not yet. ErrorCode::refused: it is of another run, or the members
  /// live. `generation` becomes the one that admits it.
  Result<bool> may_claim(const Get& get, std::uint32_t& generation);
  /// Whether it has asked the members and has no answer.
  bool waits() const { return one_thread_.checked(applied_at_).has_value(); }

 private:
  Result<bool> apply(const Get& get, std::uint32_t& generation);
  void write_application(Clock::time_point now);
  Status other_run(const std::string& theirs);
  std::string own_name() const;

  Store& store_;
  const Options& options_;
  const std::string nonce_;
  bool is_known_;
  std::optional<Clock::time_point> applied_at_;
  Clock::time_point written_at_;
  [[no_unique_address]] OneThread one_thread_{"Newcomer"};
};

/// Answers newcomers on behalf of the job's members, while they are in a generation: one for a slot that no member has
/// is admitted to the next generation. The others are refused when they have waited for some seconds, in which the loss
/// of a member would have shown. Any member may call it at any time; it does not wait.
void answer_newcomers(Store& store, const std::string& job);

/// Answers them while `generation` is being formed, and while its members connect, on behalf of a process that has
/// claimed `own_slot` in it. Those whose slot no process has claimed are admitted. A process refuses those who ask for
/// its own slot. One that has come and does not answer has ended, or stands still: who asks for its slot is admitted to
/// the generation after this one.
void admit_newcomers(Store& store, const std::string& job, std::uint32_t generation, int own_slot);

}  // namespace poseidon
