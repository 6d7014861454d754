// What every transport offers: flows that carry (header, payload), never keys or schemes.
//
// One conformance suite (tests/conformance/) holds for all of them. Threads: a Flow belongs to one
// Loop; all its methods and all calls of its Receiver happen on that loop's thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/status.h"
#include "transport/loop.h"
#include "wire/header.h"

namespace poseidon {

class Flow;

/// How the network is to treat a flow's packets, where it can (docs/network-priority.md).
struct TrafficClass {
  int dscp = 0;             // IPv4's and IPv6's differentiated services code point, 0 to 63
  int socket_priority = 0;  // SO_PRIORITY: which queue of this host's card, 0 (best effort) to 6
};

/// What owns the other end of a flow's messages. Calls come on the flow's loop, never from inside
/// Flow::send.
class Receiver {
 public:
  virtual ~Receiver() = default;

  /// A flow has something to receive. False: not in this round of the loop (Loop::round). Only media whose turns are
  /// bounded ask; when one is over they say so.
  virtual bool begin_turn(Flow& /*flow*/) { return true; }
  virtual void end_turn(Flow& /*flow*/) {}

  /// Whether a payload may come that on_header is to give a place to. False: not yet. The flow delivers nothing more,
  /// and what follows waits as well, at last in the sender, until Flow::resume; then it asks again.
  virtual bool may_receive(Flow& /*flow*/, const wire::Header& /*header*/) { return true; }

  /// A header with a payload has arrived over a medium that needs a place to put it: returns memory
  /// of exactly header.payload_bytes that stays valid until `on_message` or `on_closed`. An error closes the flow
  /// with that status.
  virtual Result<std::span<std::byte>> on_header(Flow& flow, const wire::Header& header) = 0;

  /// More of a payload has arrived where on_header said: its first `received_bytes`, fewer than all of
  /// them. They are still in the cache, so this is the time to work on them. Only media that deliver
  /// payloads piece by piece call it.
  virtual void on_progress(Flow& /*flow*/, const wire::Header& /*header*/, std::size_t /*received_bytes*/) {}

  /// The message is complete. `payload` is the memory that on_header gave, or, where the medium
  /// can lend the sender's own memory (in-process), that memory: on_header was then not called and
  /// `release` is not empty and must be called once, from any thread, when the payload is no longer read
  /// (destroying its last copy does it too).
  /// An error closes the flow with that status.
  virtual Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                            std::function<void()> release) = 0;

  /// The flow has ended: ok after our own close(), peer_lost otherwise. The last call for this flow.
  virtual void on_closed(Flow& flow, const Status& status) = 0;
};

/// A connection to one peer. Messages of one priority (wire::Header) are FIFO; one of a lower number overtakes what
/// still waits here, between messages. Inside the process nothing waits. Owned by shared_ptr; destroyed on its loop's
/// thread only after on_closed (or before a receiver was set). Every `done` of a message sent before the flow ended
/// runs before on_closed. A loop that ends with flows still open closes their connections without further calls.
class Flow {
 public:
  virtual ~Flow() = default;

  /// Must be called once, before the first message can be delivered (messages wait for it).
  virtual void set_receiver(Receiver* receiver) = 0;

  /// Sends one message: `header` (payload_bytes is filled in) and the pieces of its payload, one
  /// after the other, straight from the caller's memory. `done` runs once, on the loop, when that
  /// memory is free again: ok when the medium has taken the bytes, the flow's error otherwise.
  virtual void send(wire::Header header, std::vector<std::span<const std::byte>> payload,
                    std::function<void(const Status&)> done) = 0;

  /// Sends what is queued (up to `linger`), then closes; the receiver gets on_closed(ok). Nothing
  /// more is delivered. With a linger, TCP ends when the peer has closed its side too, or at its end.
  virtual void close(std::chrono::milliseconds linger) = 0;

  /// After Receiver::may_receive has said no: asks again, from the loop, not from inside this call. Without effect
  /// otherwise.
  virtual void resume() = 0;

  /// Marks what this end sends. ErrorCode::refused where the system does not permit it; the flow goes on.
  /// Nothing to do for media that are no network.
  virtual Status set_traffic_class(const TrafficClass& /*traffic_class*/) { return {}; }

  /// For messages to people, e.g. "10.1.0.3:41234".
  virtual const std::string& peer_name() const = 0;

  /// Bytes that crossed a network (headers included). 0 for flows inside the process.
  virtual std::uint64_t bytes_sent() const = 0;
  virtual std::uint64_t bytes_received() const = 0;
  /// Of bytes_sent() those that are known to be with the peer's host: shows whether a peer still takes anything.
  virtual std::uint64_t bytes_delivered() const { return bytes_sent(); }

  /// Which secret both ends have proved to know (wire::Key::name); empty where they have none.
  const std::string& key_id() const { return key_id_; }
  /// The transport's alone, before it hands the flow out.
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

  /// Any thread. `on_accept` runs on `loop` for every new flow (no receiver set yet). Destroying the
  /// listener (any thread but the loop's; blocks until the loop has let go) stops accepting.
  /// ErrorCode::unreachable when the address cannot be bound; the message names it and why.
  virtual Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                                   std::function<void(std::shared_ptr<Flow>)> on_accept) = 0;

  /// Any thread; `done` runs once on `loop`. Tries again until the deadline while the other side
  /// refuses (it may not be up yet), then ErrorCode::unreachable naming the address. At once ErrorCode::refused when
  /// the other side does not know the secret, mismatch when it is no Poseidon process of this version.
  virtual void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
                       std::function<void(Result<std::shared_ptr<Flow>>)> done) = 0;
};

}  // namespace poseidon
