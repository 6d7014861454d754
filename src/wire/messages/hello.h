// hello: the first message on every connection, both ways. It says who the connection is from.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "wire/messages/text_message.h"
#include "wire/pace.h"

namespace poseidon::wire {

/// The longest name of a job.
inline constexpr std::size_t kMaxJobNameBytes = 256;
/// The longest name of a run of a job.
inline constexpr std::size_t kMaxRunBytes = 64;

/// Whether `name` is a valid name of a job: 1 to kMaxJobNameBytes bytes of UTF-8 without control characters, because
/// operators read it in tables and logs.
bool is_job_name(const std::string& name);

/// The header has the rank of the worker. The payload is lines of text: the job, the run, "host 0 of 2" if it may
/// speak for its machine, "saves" from a server that does, and the addresses of the other cores.
struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t worker_count = 0;
  std::string job;
  std::uint32_t flow = 0;                  // which of the connections of one class between the two processes
  std::vector<std::string> other_cores{};  // addresses of cores 1, 2, …; only in a server's answer, from its core 0
  std::uint32_t priority_class = 0;        // the connection's class; 0 is the most urgent
  std::uint32_t generation = 0;  // the job's generation, as the sender knows it (docs/decisions/0016-generations.md)
  std::optional<Pace> pace = Pace();  // the job's pace; empty if this side does not know it
  std::string run{};  // one line: the same for all workers of a job, another one when the job starts again
  struct Host {
    std::uint32_t index = 0;
    std::uint32_t count = 0;
    bool operator==(const Host&) const = default;
  };
  std::optional<Host> host{};  // of a worker that may speak for its machine: which of how many machines that is
  bool saves = false;          // in a server's answer: it has a checkpoint_dir

  static Hello read(const Header& header, std::span<const std::byte> payload);
  TextMessage make() const;
};

}  // namespace poseidon::wire
