// PushWindow: how far this worker's pushes to one dedicated server may be ahead of the server's results.
//
// A result leaves when the last worker has pushed its part. TCP does not share a port equally within a step. Without a
// window the fast connections send everything first, the slow ones hold up all results, and the two directions of the
// server's port are busy one after the other (docs/decisions/0033-push-window.md). With it, a push asks for its result,
// and what may be on its way to a port is bounded in both directions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>

#include "base/clock.h"
#include "base/pinned.h"
#include "transport/level_queue.h"
#include "transport/loop.h"

namespace poseidon {

/// Only the loop's thread uses it.
class PushWindow : private Pinned {
 public:
  /// Which push it is. One push of a chunk is under way at a time.
  struct Id {
    std::uint32_t unit = 0;
    std::uint32_t chunk = 0;
  };
  /// Sends a push, or forgets it if `false`. It runs once.
  using Send = std::function<void(bool)>;

  /// While a server sends the results of a chunk, the next chunk comes in.
  static constexpr std::size_t kLeastPushes = 2;
  /// A server that sends nothing for longer than results usually take waits for another worker, and the port may be
  /// free. Then pushes go on, with a window that doubles each time until the next result. This is the time before the
  /// first result, and the shortest and longest one after it.
  static constexpr std::chrono::milliseconds kFirstPatience{100};
  static constexpr std::chrono::milliseconds kLeastPatience{1};
  static constexpr std::chrono::milliseconds kMostPatience{200};

  /// `loop` must outlive this object, and must not run timers any more when it ends.
  /// `limit_bytes`: how much may be pushed without a result, at least.
  PushWindow(Loop& loop, std::size_t limit_bytes);

  /// Sends a push now, or when results have made room for it. Of those that wait, the most urgent goes first (`level`,
  /// wire::Header). Only pushes that are as urgent or more fill the window for it: another worker may wait for this one
  /// before it sends what it has in common with the others.
  void push(Id id, std::uint16_t level, std::size_t size_bytes, Send send);
  /// How long the network alone takes to the server and back. While results take less than twice as long, the port is
  /// not full, and the window grows with each of them. Of several values the least holds; 0 is none.
  void set_round_trip(std::chrono::nanoseconds round_trip);
  /// The result of a push is here. Has no effect if none is awaited.
  void answered(Id id);
  /// Sends what waits. From now on nothing waits.
  void open();
  /// Forgets what waits. Nothing may be pushed any more.
  void drop();

 private:
  struct Waiting {
    Id id;
    std::uint16_t level = 0;
    std::size_t size_bytes = 0;
    Send send;
  };
  struct Awaited {
    std::uint16_t level = 0;
    std::size_t size_bytes = 0;
    Clock::time_point sent;
  };

  static std::uint64_t key_of(Id id) { return std::uint64_t{id.unit} << 32 | id.chunk; }
  bool has_room(std::uint16_t level) const;
  std::chrono::nanoseconds patience() const;
  void learn(std::chrono::nanoseconds taken);
  void adapt(std::chrono::nanoseconds taken, std::size_t answered_bytes);
  void send_soon();
  void send_waiting();
  void watch();
  void look();

  Loop& loop_;
  const std::size_t least_limit_bytes_;
  std::size_t limit_bytes_;
  std::size_t factor_ = 1;  // of the limit, while no result comes
  bool open_ = false;
  bool watching_ = false;
  bool sends_soon_ = false;
  std::chrono::nanoseconds usual_{0};      // from a push to its result; 0: not known
  std::chrono::nanoseconds variation_{0};  // mean deviation from that
  std::chrono::nanoseconds round_trip_{0};
  Clock::time_point last_result_;
  LevelQueue<Waiting> waiting_;
  std::unordered_map<std::uint64_t, Awaited> awaited_;
  std::map<std::uint16_t, std::size_t> awaited_bytes_;  // by level
};

}  // namespace poseidon
