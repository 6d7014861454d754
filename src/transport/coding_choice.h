// CodingChoice: whether it saves time to code what a loop sends and receives (coded_payload.h).
//
// Coded values take less of the network and more of the loop. While messages are under way, a loop that waits is kept
// by the network: it has the time to code, and fewer bytes arrive sooner. A loop that hardly waits is itself what keeps
// the messages, and coding would keep them longer. Values are the same either way, so every process decides for itself,
// whenever it likes, and tells its peers what it would rather receive (wire::Envelope::prefers_plain).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/one_thread.h"

namespace poseidon {

/// Times are those of now_ns(). Only the loop's thread uses it.
class CodingChoice {
 public:
  /// How much time with messages under way it looks at before it decides.
  static constexpr std::int64_t kWindowNs = 20'000'000;
  /// With a larger busy share of that time coding stops. It begins where no more than the other is to be expected. What
  /// lies between keeps a choice from changing with every window.
  static constexpr double kMostBusy = 0.9;
  static constexpr double kBusyToBegin = 0.7;

  /// At first yes: most networks are slower than a core.
  bool pays() const { return one_thread_.checked(pays_); }

  /// The loop begins to wait, or has waited.
  void on_wait(std::int64_t time_ns);
  void on_wake(std::int64_t time_ns);

  /// A message of one more flow, or of one flow less, is under way: it waits to be sent, or has arrived in part.
  void begin_message() { ++one_thread_.checked(flow_count_); }
  void end_message();

  /// So many bytes of values were coded or decoded in so much time, or could have been.
  void on_coded(std::size_t plain_bytes, std::int64_t time_ns);
  void on_plain(std::size_t plain_bytes) { one_thread_.checked(plain_bytes_) += plain_bytes; }

 private:
  void decide();

  bool pays_ = true;
  std::size_t flow_count_ = 0;
  std::int64_t woken_ns_ = 0;
  std::int64_t began_to_wait_ns_ = 0;
  // In the current window:
  std::int64_t busy_ns_ = 0;
  std::int64_t waited_ns_ = 0;
  std::uint64_t plain_bytes_ = 0;
  // Of all so far, older ones count less:
  double coded_bytes_ = 0;
  double coding_ns_ = 0;
  [[no_unique_address]] OneThread one_thread_{"CodingChoice"};
};

}  // namespace poseidon
