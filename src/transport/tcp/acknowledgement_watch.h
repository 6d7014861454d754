// AcknowledgementWatch: whether the machine at the other end of a connection still answers.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace poseidon::tcp {

/// Tells when the other end has acknowledged nothing for too long. TCP_USER_TIMEOUT does not fit: its time goes on
/// while this process is stopped, and it ends connections to a stopped process, too, whose machine answers. So it would
/// end a job that was suspended.
class AcknowledgementWatch {
 public:
  enum class Finding : std::uint8_t {
    idle,     // nothing waits for an answer; look again when something has been sent
    waiting,  // look again after interval()
    lost,
  };

  /// `silence` is Admission::silence. Sets how often the kernel probes an idle connection.
  AcknowledgementWatch(int socket, std::chrono::milliseconds silence);

  /// 0: this connection is not watched.
  std::chrono::milliseconds interval() const;
  Finding look(int socket);

 private:
  const std::chrono::milliseconds silence_;
  std::int64_t looked_ns_ = 0;  // 0: there was no answer to wait for
  Clock::time_point unanswered_since_{};
};

}  // namespace poseidon::tcp
