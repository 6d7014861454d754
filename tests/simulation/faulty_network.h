// FaultyNetwork: the network of a simulated cluster, with faults.
//
// It uses the in-process transport. Messages cross it with copies of their payloads, and are delivered like those of a
// network: header, piece, rest. The fault of a message is drawn from (seed, connection, direction, number).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/insertion_map.h"
#include "simulation/faults.h"
#include "transport/transport.h"

namespace poseidon::testing {

class FaultyFlow;

/// One process. Its slot is the machine on which it runs. A replacement has the same slot and the next incarnation.
struct Node {
  Node(int where, int incarnation, bool replaceable)
      : slot(where),
        name("s" + std::to_string(where) + "i" + std::to_string(incarnation)),
        may_be_replaced(replaceable) {}
  const int slot;
  const std::string name;
  const bool may_be_replaced;  // while it lives
  std::atomic<bool> dead{false};
  std::atomic<bool> replaced{false};              // another process is to be started in its place
  std::atomic<std::int64_t> cut_off_until_ns{0};  // until then no message reaches it or leaves it
};

/// Thread-safe. The flows, listeners and transports that it has made keep it alive.
class FaultyNetwork : public std::enable_shared_from_this<FaultyNetwork> {
 public:
  struct Settings {
    std::uint64_t seed = 0;
    FaultRates rates;
    std::chrono::milliseconds longest_delay{20};
    std::chrono::milliseconds longest_partition{300};
  };
  /// Until then nothing crosses: messages are lost, or delayed as by a connection that sends again.
  struct Blockade {
    Clock::time_point until;
    bool lossy = false;
  };
  using OnAccept = std::function<void(std::shared_ptr<Flow>)>;

  explicit FaultyNetwork(const Settings& settings) : settings_(settings) {}

  /// Makes a new process in this slot. A process that may not be replaced while it lives is killed instead.
  std::shared_ptr<Node> add_node(int slot, bool may_be_replaced);
  /// The transport of a process. Addresses that end in ":0" become the slot's first free one, such as "s1:3". So a
  /// message for a process that has ended may reach its successor.
  std::unique_ptr<Transport> transport(std::shared_ptr<Node> node);

  /// Kills the process: its connections end, nobody reaches it any more, and no message leaves it any more.
  void kill(const std::shared_ptr<Node>& node, const std::string& where);
  /// Draws a fault of a process at something that it does: it may be killed, or replaced.
  void strike(const std::shared_ptr<Node>& node, const Draw& draw, const std::string& where);
  /// Makes nothing cross from `from` to `to`, or also back, for that time.
  void part(std::uint32_t from_slots, std::uint32_t to_slots, bool both_ways, bool lossy,
            std::chrono::milliseconds duration);
  /// Stops all faults and ends partitions.
  void calm();

  const FaultLog& log() const { return log_; }

  // For flows and transports.

  const Settings& settings() const { return settings_; }
  void note(Fault fault, const std::string& where) { log_.note(fault, where); }
  /// A draw of `faults.h`. It is no fault after calm().
  Draw draw_fault(std::uint64_t key, std::uint64_t number, std::initializer_list<Fault> possible) const;
  /// Starts a partition whose groups, kind and length follow from the draw.
  void part_at_random(const Draw& draw, const std::string& where);
  std::optional<Blockade> blockade(const Node& from, const Node& to) const;

  /// The address, or ErrorCode::unreachable if it is taken.
  Result<std::string> listen(const std::shared_ptr<Node>& node, Loop& loop, const std::string& address,
                             const std::shared_ptr<OnAccept>& on_accept);
  void stop_listening(const std::string& address);
  /// The name of a new connection. Each call of connect() makes one.
  std::string connection_name(const Node& from, const std::string& address);
  /// A new flow to the listener on `address`. Null if there is none, or if it is not reached in this attempt.
  std::shared_ptr<Flow> try_connect(const std::shared_ptr<Node>& from, Loop& loop, const std::string& address,
                                    const std::string& connection, std::uint64_t attempt);
  void forget(const FaultyFlow* flow);
  /// Keeps memory until the end of the simulation, for flows that may still read it.
  void keep(std::vector<std::byte> payload);

 private:
  struct Acceptor {
    std::shared_ptr<Node> node;
    Loop& loop;
    std::weak_ptr<OnAccept> on_accept;
  };
  struct Partition {
    std::uint32_t from_slots = 0;
    std::uint32_t to_slots = 0;
    Blockade blockade;
  };
  struct OpenFlow {
    std::weak_ptr<FaultyFlow> flow;
    std::shared_ptr<Node> node;
    Loop* loop = nullptr;
  };

  std::optional<Blockade> blockade_locked(const Node& from, const Node& to) const;
  bool apart_locked(const Node& one, const Node& other) const {
    return blockade_locked(one, other) || blockade_locked(other, one);
  }
  std::shared_ptr<FaultyFlow> add_flow_locked(std::shared_ptr<FaultyFlow> flow, Loop& loop,
                                              const std::shared_ptr<Node>& node);

  const Settings settings_;
  FaultLog log_;
  std::atomic<bool> calm_{false};

  mutable std::mutex mutex_;  // the rest is guarded by it
  std::map<int, int> incarnations_;

  std::map<std::string, int> connections_;  // counts, by who connects and where to
  std::map<std::string, Acceptor> acceptors_;
  InsertionMap<const FaultyFlow, OpenFlow> flows_;
  std::vector<Partition> partitions_;
  std::vector<std::vector<std::byte>> kept_;
};

}  // namespace poseidon::testing
