// Connections: a client's flows to servers and peers. It dials, greets, decides who is let in, and knows the names of
// the processes at the other ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/flight_record.h"
#include "base/flight_recorder.h"
#include "client/flight_report.h"
#include "client/lobby.h"
#include "poseidon/client.h"
#include "poseidon/options.h"
#include "scheme/scheme.h"
#include "transport/transport.h"
#include "wire/messages.h"

namespace poseidon {

/// Where a client connects to: one address per server core, which transports lead there, and the peers'.
struct Endpoints {
  /// One for all priority classes, or one for each; an address has as many parts, joined by '|'.
  using Transports = std::vector<Transport*>;
  struct ServerEndpoint {
    Transports transports;
    std::vector<std::string> addresses;  // by core; of a dedicated server the first one's, which knows the others
    bool dedicated = false;
    bool local = false;  // a server of this process
    std::string host;    // the machine's name; empty: not known
  };
  struct PeerEndpoint {
    Transports transports;
    std::string address;
    std::string host;
  };
  std::vector<ServerEndpoint> servers;
  std::vector<PeerEndpoint> peers;  // by rank
  std::string run;                  // equal for all members, another one each time that they meet
};

enum class LinkKind : std::uint8_t { server, peer };

/// One connection.
struct LinkState {
  static constexpr std::size_t kUnknown = static_cast<std::size_t>(-1);  // the index of who has not said it yet

  std::shared_ptr<Flow> flow;
  LinkKind kind = LinkKind::peer;
  std::size_t index = 0;  // server or rank
  std::size_t lane = 0;   // of the server's; of a peer's the priority class
  bool greeted = false;
  bool left = false;  // said goodbye
  Buffer text;        // of hello, refuse and abort
  // For records and messages.
  std::int64_t last_progress_ns = 0;
  bool in_payload = false;
  wire::Header receiving;  // while in_payload
  std::size_t received_bytes = 0;

  /// Whether it is known who is at the other end.
  bool known() const { return index != kUnknown; }
  FlightEvent::Party party() const {
    return kind == LinkKind::peer ? FlightEvent::Party::peer : FlightEvent::Party::server;
  }
};

/// How this rank learns of a failure, and about whom.
struct FailureCause {
  FailureSource source = FailureSource::found;
  FlightEvent::Party party = FlightEvent::Party::none;
  std::uint32_t index = kNoFlightId;
  bool planned = false;  // nothing has failed

  static FailureCause of(FailureSource source, const LinkState& link) {
    return {source, link.party(), static_cast<std::uint32_t>(link.index)};
  }
};

/// Only the loop's thread uses it, where nothing else is said.
class Connections {
 public:
  /// What the client wants to know, on the loop.
  struct Callbacks {
    std::function<void(const Status&, const FailureCause&)> on_failure;
    std::function<void(const std::string&)> on_notice;
  };
  static constexpr auto kLinger = std::chrono::seconds(2);  // of a flow that is closed while it still has to send

  /// `options` has the rank, world size and number of the generation, and outlives this, as `receiver` does. All flows
  /// have this receiver, and their LinkState as context. Peers come through the lobby, which is on the loop.
  Connections(const Options& options, const Cluster& cluster, Receiver& receiver, Callbacks callbacks,
              std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby, Executor& executor);

  /// Starts to connect to all servers and peers. Not the loop's thread, since it may have to look up names.
  void connect(const Endpoints& endpoints);
  /// The other end of a connection has said who it is. ErrorCode::refused: it does not belong here.
  Status on_hello(LinkState& link, const wire::Hello& hello);
  /// Whether all servers and peers have greeted.
  bool all_greeted() const;
  /// How many cores each server has; known when all have greeted.
  std::vector<int> core_counts() const;
  /// Lets in nobody from here on. Any thread but the loop's.
  void stop_accepting() { lobby_->close(); }
  /// Sends a last message over each connection and closes it.
  void close(const wire::Header& last_message, const std::shared_ptr<const std::string>& text);
  /// Takes out a connection that has closed. Its state lives as long as the node.
  std::map<const Flow*, LinkState>::node_type remove(Flow& flow);
  bool empty() const { return flows_.empty(); }
  /// Whether no other connection leads to the same process.
  bool is_last(const LinkState& link) const;

  const Links& links() const { return links_; }
  PriorityMap& priorities() { return links_.priorities; }
  FlightRecorder& recorder() { return recorder_; }
  const FlightRecorder& recorder() const { return recorder_; }
  TrafficStats traffic() const;

  /// Something has arrived on the connection.
  void heard(LinkState& link) {
    link.last_progress_ns = now_ns();
    last_progress_ns_.store(link.last_progress_ns, std::memory_order_relaxed);
  }
  /// Looks whether something has been sent since the last call, which counts as progress, too.
  void note_traffic();
  /// When something arrived or left last, by the monotonic clock. Any thread.
  std::int64_t last_progress_ns() const { return last_progress_ns_.load(std::memory_order_relaxed); }
  /// Adds an event of the connection to the flight recorder.
  void note(FlightEvent::Kind kind, const LinkState& link, const char* what, const wire::Header* about = nullptr);

  // For people.
  /// "rank 1 on HOST": this rank. Any thread.
  std::string here() const;
  /// Who is at the other end, and its address.
  std::string describe(const LinkState& link) const;
  /// Who has not greeted yet.
  std::string not_linked() const;
  /// "; last heard of rank 2 31.2 s ago, rank 1 12 ms ago": each process once, those silent for longest first.
  std::string last_heard() const;
  /// All connections to known processes, first those that have ended.
  std::vector<LinkReport> reports() const;
  const std::string& run() const { return endpoints_.run; }
  /// Whether connect() has been called.
  bool has_endpoints() const { return !endpoints_.peers.empty(); }

 private:
  void adopt(std::shared_ptr<Flow> flow, LinkKind kind, std::size_t index, std::size_t lane, bool greet);
  void watch_pending(const std::shared_ptr<Flow>& flow);
  void dial(const Endpoints::Transports& transports, const std::string& address, LinkKind kind, std::size_t index,
            std::size_t lane);
  void dial_server(std::size_t index, const std::vector<std::string>& addresses);
  Status greeted_by_peer(LinkState& link, const wire::Hello& hello);
  void greeted_by_server(LinkState& link, const wire::Hello& hello);
  void send_hello(Flow& flow, std::size_t lane);
  void mark(Flow& flow, std::size_t priority_class);
  std::string host_of(LinkKind kind, std::size_t index) const;
  std::string name_of(LinkKind kind, std::size_t index) const;
  LinkReport report_of(const LinkState& link, bool connected) const;

  const Options& options_;
  const bool colocated_;    // servers are embedded in the workers
  const std::string host_;  // this machine's name
  Receiver& receiver_;
  const Callbacks callbacks_;
  const std::shared_ptr<Loop> loop_;
  const std::unique_ptr<Lobby> lobby_;
  std::atomic<std::int64_t> last_progress_ns_{0};

  Links links_;
  std::map<const Flow*, LinkState> flows_;
  Endpoints endpoints_;
  Clock::time_point server_deadline_;  // of connecting
  Clock::time_point peer_deadline_;
  bool closing_ = false;
  bool told_of_marks_ = false;  // that the system does not permit them
  FlightRecorder recorder_;
  std::vector<LinkReport> ended_links_;
  std::uint64_t known_bytes_sent_ = 0;  // when last looked at
  TrafficStats closed_traffic_;         // of connections that have ended
};

}  // namespace poseidon
