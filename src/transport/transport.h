// What every transport offers: flows that carry (header, payload). A transport knows nothing of keys or schemes.
//
// All transports pass one conformance suite (tests/conformance/). Threads: a Flow belongs to one Loop. All its methods
// and all calls of its Receiver happen on that loop's thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/buffer.h"
#include "poseidon/status.h"
#include "poseidon/traffic.h"
#include "transport/loop.h"
#include "wire/header.h"

namespace poseidon {

class Flow;

/// How the network should treat a flow's packets, if it can (docs/network-priority.md).
struct TrafficClass {
  int dscp = 0;             // IPv4's and IPv6's differentiated services code point, 0 to 63
  int socket_priority = 0;  // SO_PRIORITY: which queue of this host's card, 0 (best effort) to 6
  bool shared = false;      // there are several classes, which share this host's port
  bool yields = false;      // it is the last of them: its packets should not keep those of others waiting in this host
};

/// Takes the messages of a flow. It is called on the flow's loop, never from inside Flow::send.
class Receiver {
 public:
  virtual ~Receiver() = default;

  /// The flow has something to receive. Return false to skip this flow this round (Loop::round). Called only by
  /// transports that limit a turn; each true is followed by end_turn().
  virtual bool begin_turn(Flow& /*flow*/) { return true; }
  virtual void end_turn(Flow& /*flow*/) {}

  /// Whether the message of `header` may be received now. Return false to delay it: the flow then delivers nothing more
  /// until Flow::resume, and calls this again. Later messages wait as well, in the end in the sender. Called for every
  /// message from a network, and within a host for payloads that are copied.
  virtual bool may_receive(Flow& /*flow*/, const wire::Header& /*header*/) { return true; }

  /// A message's header has arrived. Every transport calls this once for each message, before anything else of it is
  /// delivered. The receiver checks the message here. It returns the memory for the payload: exactly
  /// header.payload_bytes, valid until `on_message` or `on_closed`. If `lent`, the payload stays where it is and comes
  /// with on_message; the returned memory is not used and may be empty. An error closes the flow with that status, and
  /// on_message is not called.
  virtual Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool lent) = 0;

  /// More of a payload has arrived in the memory that the receiver gave: its first `received_bytes`, fewer than all of
  /// them. They are still in the cache, so this is the time to work on them. Called only by transports that deliver
  /// payloads piece by piece.
  virtual void on_progress(Flow& /*flow*/, const wire::Header& /*header*/, std::size_t /*received_bytes*/) {}

  /// The message is complete. `payload` is the memory that accept() returned, and `release` is empty. If the message
  /// was lent, `payload` is the sender's memory: `release` is not empty and must be called once, from any thread, when
  /// the payload is no longer read (destroying its last copy does it too). An error closes the flow with that status.
  virtual Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                            std::function<void()> release) = 0;

  /// The flow has ended. `status` is ok after this end's close(), and peer_lost otherwise. This is the last call for
  /// the flow.
  virtual void on_closed(Flow& flow, const Status& status) = 0;
};

/// A connection to one peer. Only its loop's thread uses it (those that derive from it check it), but any thread may
/// ask for the peer's name. Messages of one priority (wire::Header) are first in, first out. A message of a lower
/// number overtakes messages that still wait here. Inside the process no message waits. A flow is owned by shared_ptr,
/// and is destroyed on its loop's thread after on_closed, or before a receiver was set. Every `done` of a message that
/// was sent before the flow ended runs before on_closed. A loop that ends while flows are open closes their connections
/// without further calls.
class Flow {
 public:
  /// Called on the loop when a message has been sent, or cannot be sent any more.
  using Done = std::function<void(const Status&)>;

  virtual ~Flow() = default;

  /// Sets the receiver. Must be called once. Messages wait until then.
  virtual void set_receiver(Receiver* receiver) = 0;

  /// Sends one message: `header` (payload_bytes is filled in) and the pieces of its payload, one after the other,
  /// directly from the caller's memory. `done` runs once, on the loop, when that memory is free again. Its status is ok
  /// if the transport has taken the bytes, and the flow's error otherwise.
  ///
  /// With a coding in the header the payload is coded already (code_payload), and payload_bytes are those of its
  /// values. Only for a flow that codes.
  virtual void send(wire::Header header, Pieces payload, Done done) = 0;

  /// Sends what is queued, for at most `linger`, and closes the flow. The receiver gets on_closed(ok), and no further
  /// messages. With a linger, a TCP flow ends when the peer has closed its side, too, or when the linger is over. A
  /// further call without a linger ends it at once.
  virtual void close(std::chrono::milliseconds linger) = 0;

  /// Makes the flow call Receiver::may_receive again after that has returned false. The call comes from the loop, not
  /// from inside this call. Has no effect otherwise.
  virtual void resume() = 0;

  /// Marks the packets that this end sends. Transports that use no network do nothing. ErrorCode::refused: the system
  /// does not permit it; the flow goes on.
  virtual Status set_traffic_class(const TrafficClass& /*traffic_class*/) { return {}; }

  /// The peer's name for messages, e.g. "10.1.0.3:41234".
  virtual const std::string& peer_name() const = 0;

  /// Whether it would now code a payload of so many bytes of floating-point values, so that fewer travel.
  virtual bool codes(std::size_t /*payload_bytes*/) const { return false; }

  /// What it has sent and received so far. All counts are 0 for flows inside the process.
  virtual TrafficStats traffic() const { return {}; }
  /// The part of traffic().bytes_sent that is known to have reached the peer's host. It shows whether the peer still
  /// takes anything.
  virtual std::uint64_t bytes_delivered() const { return traffic().bytes_sent; }

  /// What the peer's host has acknowledged. It answers also while the peer's process does not run.
  struct Answer {
    std::chrono::nanoseconds missing{0};     // for how long it has acknowledged nothing although something is sent
    std::chrono::nanoseconds round_trip{0};  // how long acknowledgements took so far
    std::chrono::nanoseconds least_round_trip{0};  // the shortest one; 0: not known
  };
  /// Transports that use no network do not miss answers.
  virtual Answer answer() const { return {}; }

  /// What the network has done for this end so far. All counts are 0 for transports that use no network.
  struct Delivery {
    std::uint64_t received_bytes = 0;  // here without a gap, read by this process or not
    std::uint64_t packets = 0;         // with data, sent and received
    std::uint64_t lost_packets = 0;    // sent again, or received after a later one
  };
  virtual Delivery delivery() const { return {}; }

  /// From now on sends evenly, and not more than this in a second. 0: no limit. Transports that use no network have no
  /// limit.
  virtual void limit_rate(std::uint64_t /*bytes_per_second*/) {}

  /// Sends nothing for this time, or goes on at once if it is zero. What the system has taken already still leaves.
  /// close() ends it. Transports that use no network do nothing.
  virtual void hold(std::chrono::microseconds /*time*/) {}

  /// Which secret both ends have proved to know (wire::Key::name). Empty if they have none.
  const std::string& key_id() const { return key_id_; }
  /// Only the transport calls it, before it hands the flow out.
  void set_key_id(std::string key_id) { key_id_ = std::move(key_id); }

  /// The receiver's own record of this connection, so that no message needs a look-up. Whoever owns the flow sets it
  /// before set_receiver() and keeps the object until on_closed has returned; the transport never reads it. `T` is the
  /// type that was set.
  template <typename T>
  T& context() const {
    return *static_cast<T*>(context_);
  }
  template <typename T>
  void set_context(T* context) {
    context_ = context;
  }

  /// Free for the receiver's use, e.g. the rank at the other end. -1 at first.
  int tag = -1;

 private:
  std::string key_id_;
  void* context_ = nullptr;
};

using OnAccept = std::function<void(std::shared_ptr<Flow>)>;
using OnConnect = std::function<void(Result<std::shared_ptr<Flow>>)>;

/// Calls `done` on the loop for an address that has no meaning.
inline void cannot_connect(Loop& loop, OnConnect done, const Status& why) {
  loop.post([done = std::move(done), status = why.with_context("cannot connect")] { done(status); });
}

/// A bound address that accepts flows.
class Listener {
 public:
  virtual ~Listener() = default;
  /// "host:port" that a peer can connect to.
  virtual const std::string& address() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  /// Accepts flows at `address`. `on_accept` runs on `loop` for every new flow, before a receiver is set. To stop,
  /// destroy the listener on any thread but the loop's (TcpListener, ShmListener, InprocListener, UcxListener and
  /// SpreadListener check it); this blocks until the loop no longer uses it. Any thread.
  /// ErrorCode::unreachable: the address cannot be bound; the message names it and the reason.
  virtual Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept) = 0;

  /// Connects to `address`. `done` runs once on `loop`. While the other side refuses, because it may not be up yet, it
  /// tries again until the deadline. Any thread. ErrorCode::unreachable, after the deadline, names the address.
  /// ErrorCode::refused, at once: the other side does not know the secret. ErrorCode::mismatch, at once: it is no
  /// Poseidon process of this version.
  virtual void connect(Loop& loop, const std::string& address, Clock::time_point deadline, OnConnect done) = 0;
};

}  // namespace poseidon
