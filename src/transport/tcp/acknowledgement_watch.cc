#include "transport/tcp/acknowledgement_watch.h"

#include <algorithm>
#include <utility>

#include "transport/tcp/kernel_info.h"
#include "transport/tcp/socket_option.h"

namespace poseidon::tcp {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kLooks = 8;  // in the time of a silence
constexpr milliseconds kLongestInterval{5'000};
// An idle connection to a dead machine is noticed after 15 + 6 × 5 seconds, unless `silence` sets another time.
constexpr seconds kKeepIdle{15};
constexpr seconds kKeepInterval{5};
constexpr std::int64_t kKeepCount = 6;
constexpr std::int64_t kMostKeepCount = 127;  // that the kernel takes

}  // namespace

AcknowledgementWatch::AcknowledgementWatch(int socket, milliseconds silence) : silence_(silence) {
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  seconds idle = kKeepIdle;
  seconds interval = kKeepInterval;
  std::int64_t count = kKeepCount;
  if (silence.count() > 0) {
    idle = std::clamp(std::chrono::duration_cast<seconds>(silence / 2), seconds(1), kKeepIdle);
    const auto rest = std::max(silence - idle, milliseconds(1));
    interval = std::clamp(std::chrono::duration_cast<seconds>(rest / kKeepCount), seconds(1), kKeepInterval);
    count = std::min<std::int64_t>((rest - milliseconds(1)) / interval + 1, kMostKeepCount);
  }
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(idle.count()));
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(interval.count()));
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>(count));
}

milliseconds AcknowledgementWatch::interval() const { return std::min(silence_ / kLooks, kLongestInterval); }

AcknowledgementWatch::Finding AcknowledgementWatch::look(int socket) {
  const tcp_info info = kernel_info(socket);
  const std::int64_t time_ns = now_ns();
  const std::int64_t last_ns = std::exchange(looked_ns_, time_ns);
  // A peer that has no room is probed. Its machine acknowledges the probes, also while the process is stopped.
  if (info.tcpi_unacked == 0 && info.tcpi_probes == 0) {
    looked_ns_ = 0;
    return info.tcpi_notsent_bytes == 0 ? Finding::idle : Finding::waiting;
  }
  // A peer that has no room is sent to ever more seldom. So what counts is whether the last packet was answered.
  const bool answered = info.tcpi_last_ack_recv <= info.tcpi_last_data_sent ||
                        time_ns - last_ns > std::int64_t{info.tcpi_last_ack_recv} * 1'000'000;
  if (last_ns == 0 || answered) unanswered_since_ = Clock::now();
  return Clock::now() - unanswered_since_ >= silence_ ? Finding::lost : Finding::waiting;
}

}  // namespace poseidon::tcp
