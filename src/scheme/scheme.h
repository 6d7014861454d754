// SchemeProtocol: how one scheme sends and receives an exchange's messages. There is one file per scheme.
#pragma once

#include <memory>
#include <vector>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "base/flight_recorder.h"
#include "base/invariant.h"
#include "plan/hosts.h"
#include "plan/priority.h"
#include "scheme/exchange.h"
#include "scheme/push_window.h"
#include "transport/transport.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// The worker's connections and helpers. It outlives all exchanges.
struct Links {
  std::uint32_t rank = 0;
  std::uint32_t worker_count = 1;
  std::vector<std::vector<Flow*>> servers;  // by server and lane
  std::vector<bool> server_is_local;        // by server: it lives in this process, so that nothing crosses a network
  std::vector<std::unique_ptr<PushWindow>> push_windows;  // by server; empty if the servers are the workers' own
  std::size_t flow_count = 1;                             // flows of each class from this worker to each server core
  std::size_t class_count = 1;                            // the number of priority classes
  bool by_worker = false;                                 // Assignment::worker
  std::vector<std::vector<Flow*>> peers;                  // by rank and class; none for this rank
  Hosts hosts;
  Loop* loop = nullptr;
  Executor* executor = nullptr;
  std::shared_ptr<BufferPool> pool;
  PriorityMap priorities{1};
  FlightRecorder* recorder = nullptr;  // the recorder of the loop

  /// Returns the number of connections from this worker to each server core.
  std::size_t lanes_per_core() const { return flow_count * class_count; }
  /// Returns the connection that a chunk uses to its server: flow `chunk.flow` of the class to the chunk's core.
  std::size_t lane_of(const Chunk& chunk, std::size_t priority_class) const {
    const auto& lanes = servers[static_cast<std::size_t>(chunk.server)];
    const auto core = by_worker ? rank % (lanes.size() / lanes_per_core()) : static_cast<std::size_t>(chunk.core);
    return (core * flow_count + static_cast<std::size_t>(chunk.flow)) * class_count + priority_class;
  }
  Flow& flow_of(const Chunk& chunk, std::size_t priority_class) const {
    const auto& lanes = servers[static_cast<std::size_t>(chunk.server)];
    const std::size_t lane = lane_of(chunk, priority_class);
    invariant(lane < lanes.size() && lanes[lane] != nullptr, "a chunk's server is connected when it is needed");
    return *lanes[lane];
  }
  /// Returns the window of the chunk's server; null if it has none.
  PushWindow* window_of(const Chunk& chunk) const {
    return push_windows.empty() ? nullptr : push_windows[static_cast<std::size_t>(chunk.server)].get();
  }
  bool is_local(const Chunk& chunk) const { return server_is_local[static_cast<std::size_t>(chunk.server)]; }
};

/// Has no state; the state is in the Exchange. Only the loop thread uses it (Syncer checks it).
class SchemeProtocol {
 public:
  explicit SchemeProtocol(const SchemeTraits& traits) : traits_(traits) {}
  virtual ~SchemeProtocol() = default;

  /// Sends this worker's contribution. The exchange completes through complete_if_done().
  virtual void start(Exchange& exchange, const Links& links) const = 0;

  /// Checks a message whose header is here, and notes that it comes. Called once for each message. Returns the memory
  /// for its payload; if `lent`, the payload comes with receive(), and nothing is returned. ErrorCode::mismatch: the
  /// message does not fit, and receive() will not be called.
  virtual Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                              const Links& links) const = 0;

  /// Takes a complete message that accept() has accepted. `payload` is the memory that it returned, or it is lent by
  /// the sender during the call.
  virtual Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                         const Links& links) const = 0;

  /// Returns text for error messages such as "waiting for the result of chunk 3 from server 1".
  virtual std::string waiting_for(const Exchange& exchange, const Links& links) const = 0;

  /// Whether the exchange, which runs, still needs a part of this peer, or a result from it.
  virtual bool lacks(const Exchange& /*exchange*/, const Links& /*links*/, std::uint32_t /*peer*/) const {
    return false;
  }
  /// The same without results: a peer that leaves in order has sent its parts, but may not send a result any more.
  virtual bool lacks_part(const Exchange& exchange, const Links& links, std::uint32_t peer) const {
    return lacks(exchange, links, peer);
  }
  /// Whether this worker itself exchanges the chunk with its server, if the scheme uses servers.
  virtual bool exchanges_with_server(const Exchange& /*exchange*/, const Links& /*links*/,
                                     const Chunk& /*chunk*/) const {
    return true;
  }

  const SchemeTraits& traits() const { return traits_; }

 private:
  const SchemeTraits traits_;
};

/// Returns the only object of a class of protocols that needs no arguments. It has static lifetime.
template <typename Protocol>
const Protocol& only_one() {
  static const Protocol protocol;
  return protocol;
}

/// Returns the protocol of a scheme, which must not be Scheme::automatic. It has static lifetime and no state.
const SchemeProtocol& protocol_of(Scheme scheme);
/// Returns the protocol of a unit's exchange by this scheme: where the unit goes by machine, that of the scheme's way
/// by machine, if it has one (host_reduction.h).
const SchemeProtocol& protocol_for(const ExchangeUnit& about, Scheme scheme);

/// Returns the envelope of every message of an exchange, without kind and chunk.
wire::Envelope envelope_of(const Exchange& exchange, const Links& links);
/// Returns what this worker pushes (`kind`: push), or sends as factors or rows, without the chunk. The exchange's
/// operation must be a push.
wire::Contribution contribution_of(const Exchange& exchange, const Links& links, wire::Kind kind);

/// The receiver of a message.
struct Receiving {
  FlightEvent::Party party = FlightEvent::Party::none;
  bool crosses_network = false;  // the bytes are counted as network traffic
};

/// Sends a part of the worker's memory. It keeps the exchange's counts of pending sends and of bytes.
void send_counted(Exchange& exchange, const Links& links, Flow& flow, Receiving to, const wire::Header& header,
                  Pieces payload);
/// Does the same to the server that owns the chunk, when the server's window has room for it. The exchange counts it as
/// pending from now on.
void send_to_server(Exchange& exchange, const Links& links, const Chunk& chunk, const wire::Header& header,
                    Pieces payload);

/// The pieces of the factors' payload: all left rows, then all right rows.
Pieces factor_pieces(const ExchangeUnit& about, const FactoredGradient& factored);

}  // namespace poseidon
