// HostQueue: what this process has in the queue of its own host's port, and how much more may go there.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/pinned.h"

namespace poseidon::tcp {

/// How much of one host's queue may be filled. HostQueue's mutex guards it.
///
/// Just enough that the queue does not run dry between two looks: it falls to twice what left between two looks, while
/// the queue is never empty, and rises when the queue is empty although somebody waits for room. Linux limits the
/// queues of cards in this way, too.
class QueueLimit {
 public:
  std::size_t bytes() const { return bytes_; }
  /// What was found in the queue, how much has left it since the last look, and whether somebody was refused since.
  void look(Clock::time_point now, std::size_t queued_bytes, std::size_t left_bytes, bool refused);

 private:
  std::size_t bytes_ = kMostBytes;
  std::size_t most_left_bytes_ = 0;  // between two looks since window_begin_
  Clock::time_point window_begin_{};

  static constexpr std::size_t kMostBytes = std::size_t{8} << 20;
};

/// A port that is a plain queue sends packets in the order in which they came, whatever their class. The kernel lets
/// each connection keep a few packets in that queue. Those of many connections keep an urgent packet waiting for tens
/// of milliseconds. So connections that yield (TrafficClass::yields) add to the queue only when little is in it.
///
/// There is one for the process, because all its connections share the host's port. Any thread.
class HostQueue {
 public:
  /// A connection whose bytes count. It leaves with this object, which must be destroyed before the socket is closed.
  class Member : private Pinned {
   public:
    /// `yields`: its packets should not keep those of the others waiting.
    Member(int socket, bool yields);
    ~Member();

    /// How many bytes it may hand to the kernel now. 0: none; ask again after kPause. There is a limit only for who
    /// yields, and only while others send a good part of all bytes.
    std::size_t room() const;
    /// It did so.
    void add(std::size_t bytes) const;

   private:
    const int socket_;
    const bool yields_;
  };

  static constexpr std::chrono::milliseconds kPause{1};

 private:
  static HostQueue& of_process();
  std::size_t room();
  void add(std::size_t bytes, bool yields);
  void look(Clock::time_point now);

  std::mutex mutex_;  // guards all that follows
  std::vector<int> sockets_;
  QueueLimit limit_;
  Clock::time_point next_look_{};
  std::size_t queued_bytes_ = 0;  // at the last look, and what was added since
  bool refused_ = false;          // somebody, since the last look
  // What has been sent lately: after each kHalfLife half of it counts.
  std::size_t yielding_bytes_ = 0, urgent_bytes_ = 0;
  Clock::time_point next_halving_{};
};

}  // namespace poseidon::tcp
