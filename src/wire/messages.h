// The few messages whose payload has a form: hello, the update rule, and the texts of refuse and abort.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "poseidon/status.h"
#include "poseidon/update.h"
#include "wire/header.h"
#include "wire/pace.h"

namespace poseidon::wire {

/// Longest text of a hello, refuse or abort; anything longer is cut when sent and refused when received.
inline constexpr std::size_t kMaxTextBytes = 4096;

/// Longest name of a job.
inline constexpr std::size_t kMaxJobNameBytes = 256;

/// Longest name of a run of a job.
inline constexpr std::size_t kMaxRunBytes = 64;

/// Whether a job may be called so: 1 to kMaxJobNameBytes bytes in one line.
bool is_job_name(const std::string& name);

/// Who a connection is from. The answer of a server's first core says where the others listen.
struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t worker_count = 0;
  std::string job;
  std::uint32_t flow = 0;                  // which of the connections between the two
  std::vector<std::string> other_cores{};  // only in a server's answer: core 1, 2, …
  std::uint32_t priority_class = 0;        // of the connection, 0 the most urgent
  std::uint32_t generation = 0;            // of the job, as the sender knows it (docs/decisions/0016-generations.md)
  std::optional<Pace> pace = Pace();       // of the job; empty: one that this side does not know
  std::string run{};  // of the job, one line: the same for all its workers, and another one when the job starts again
};

/// A message whose payload is a text that it owns.
struct TextMessage {
  Header header;
  std::shared_ptr<const std::string> text;
  std::span<const std::byte> payload() const { return std::as_bytes(std::span(*text)); }
};

TextMessage make_hello(const Hello& hello);
/// The step of an abort with which nothing has failed: the job only forms its next generation.
inline constexpr std::uint64_t kPlannedAbort = 1;

/// `kind` is refuse or abort; `about` gives the unit, chunk and step it is about.
TextMessage make_error(Kind kind, const Header& about, const Status& status);

/// The message that tells how unit `header.unit` is updated; `step` of the update is not part of it.
TextMessage make_rule(const Header& about, const UpdateRule& rule);
/// ErrorCode::mismatch for a payload of another size, an unknown kind or a value that is not finite.
Result<UpdateRule> read_rule(std::span<const std::byte> payload);

Hello read_hello(const Header& header, std::span<const std::byte> payload);
Status read_error(const Header& header, std::span<const std::byte> payload);

}  // namespace poseidon::wire
