// Connections: a client's flows to servers and peers. It connects, greets, checks who is at the other end, and names
// the processes there in messages.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/flight_record.h"
#include "base/flight_recorder.h"
#include "base/insertion_map.h"
#include "client/flight_report.h"
#include "client/lobby.h"
#include "poseidon/client.h"
#include "poseidon/options.h"
#include "scheme/scheme.h"
#include "transport/addressee.h"
#include "transport/transport.h"
#include "wire/messages/hello.h"

namespace poseidon {

/// The addresses to which a client connects, and the transports that lead there.
struct Endpoints {
  /// One transport for all priority classes, or one for each class. An address has as many parts, joined by '|'.
  using Transports = std::vector<Transport*>;
  struct ServerEndpoint {
    Transports transports;
    std::vector<std::string>
        addresses;  // by core; for a dedicated server only the first core's, which tells the others
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
  std::string run;                  // equal for all members, and new each time that they meet
};

enum class LinkKind : std::uint8_t { server, peer };

/// One connection.
struct LinkState {
  static constexpr std::size_t kUnknown =
      static_cast<std::size_t>(-1);  // the index of a process that has not identified itself

  std::shared_ptr<Flow> flow;
  LinkKind kind = LinkKind::peer;
  std::size_t index = 0;  // of the server, or the rank
  std::size_t lane = 0;   // to a server: the lane; to a peer: the priority class
  bool greeted = false;
  bool left = false;     // the process has said goodbye
  bool leaving = false;  // this rank has said goodbye to the process
  // Of the message that has been accepted:
  Addressee* addressee = nullptr;  // null: the message goes to the handler of its kind
  Buffer text;
  // The following is for flight records and error messages.
  std::int64_t last_progress_ns = 0;
  std::int64_t last_sign_ns = 0;  // of life: progress or a heartbeat
  bool beating = false;           // a heartbeat is being sent
  // Of servers:
  std::int64_t asked_ns = 0;  // when a heartbeat was sent that it has not answered; 0: none
  bool idle = false;          // it has answered the last one, and has nothing under way for this rank
  bool limited = false;       // it limits this job's rate, so it may have something that it does not send yet
  bool in_payload = false;
  wire::Header receiving;  // valid while in_payload
  std::size_t received_bytes = 0;

  wire::Direction direction() const {
    return kind == LinkKind::peer ? wire::Direction::from_peer : wire::Direction::from_server;
  }
  /// Whether it is known who is at the other end.
  bool known() const { return index != kUnknown; }
  FlightEvent::Party party() const {
    return kind == LinkKind::peer ? FlightEvent::Party::peer : FlightEvent::Party::server;
  }
};

/// How this rank has learnt of a failure, and which process it is about.
struct FailureCause {
  FailureSource source = FailureSource::found;
  FlightEvent::Party party = FlightEvent::Party::none;
  std::uint32_t index = kNoFlightId;
  bool planned = false;  // nothing has failed

  static FailureCause of(FailureSource source, const LinkState& link) {
    return {source, link.party(), static_cast<std::uint32_t>(link.index)};
  }
};

/// Only the loop's thread uses it, except for the methods that name other threads.
class Connections {
 public:
  /// Calls to the client, on the loop.
  struct Callbacks {
    std::function<void(const Status&, const FailureCause&)> on_failure;
    std::function<void(const std::string&)> on_notice;
  };
  static constexpr auto kLinger = std::chrono::seconds(2);  // how long a closing flow may still send

  /// `options` has the rank, world size and number of the generation. `options` and `receiver` must outlive this
  /// object. All flows have this receiver, and their LinkState as context. The lobby accepts the peers' connections on
  /// the loop.
  Connections(const Options& options, const Cluster& cluster, Receiver& receiver, Callbacks callbacks,
              std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby, Executor& executor);

  /// Starts to connect to all neighbours (mesh.h), and to all servers. In large jobs without dedicated servers it does
  /// not connect to servers. It may have to look up names, so the loop's thread must not call it.
  void connect(Endpoints endpoints);
  /// Starts to connect to the servers that have chunks of the plan, unless it has begun before. All must have greeted
  /// to which this rank has connected before.
  void connect_servers(const Plan& plan);
  /// Starts to connect to all peers. Once it has, further calls have no effect.
  void connect_all_peers();
  /// Whether all peers have greeted.
  bool all_peers_greeted() const {
    return loop_->checked(greeted_peer_lanes_) == (links_.worker_count - 1) * links_.class_count;
  }
  /// Handles the hello of a connection. ErrorCode::refused: the process at the other end does not belong to this job.
  Status on_hello(LinkState& link, const wire::Hello& hello);
  /// Whether all have greeted to which this rank has connected, or which have connected to it.
  bool all_greeted() const { return loop_->checked(awaited_lanes_) == 0; }
  /// The number of cores of each server. It is known when all have greeted.
  std::vector<int> core_counts() const;
  /// Whether a server that has greeted saves what it keeps.
  bool servers_save() const { return loop_->checked(servers_save_); }
  /// Accepts no further connections. Any thread but the loop's may call it.
  void stop_accepting() { lobby_->close(); }
  /// Says over each connection that this rank starts nothing any more.
  void say_goodbye();
  /// Sends a last message over each connection, unless it has said goodbye, and closes it.
  void close(const wire::Header& last_message, const std::shared_ptr<const std::string>& text);
  /// Removes a connection that has closed. Its state lives as long as the returned node.
  InsertionMap<const Flow, LinkState>::Node remove(Flow& flow);
  bool empty() const { return loop_->checked(flows_).empty(); }
  /// Connects again to a dedicated server that has cut off a connection before it greeted, as one does to which too
  /// many come at once. Returns false if `link` is none of that kind, or if there is no time left for it.
  bool redial(const LinkState& link);
  /// Whether no other connection to the same process is open, but for those over which that has said goodbye.
  bool is_last(const LinkState& link) const;

  const Links& links() const { return loop_->checked(links_); }
  /// The same for whoever reads them on the loop later. Any thread.
  const Links& links_to_read_later() const { return links_; }
  PriorityMap& priorities() { return loop_->checked(links_).priorities; }
  FlightRecorder& recorder() { return loop_->checked(recorder_); }
  const FlightRecorder& recorder() const { return loop_->checked(recorder_); }
  TrafficStats traffic() const;

  /// Notes that something has arrived on the connection.
  void heard(LinkState& link) {
    loop_->check_thread();
    link.last_sign_ns = link.last_progress_ns = now_ns();
    last_progress_ns_.store(link.last_progress_ns, std::memory_order_relaxed);
  }
  /// Sends a heartbeat to each neighbour, over the connection of the first class.
  void beat(std::uint32_t level);
  /// Says to all neighbours what this rank waits for.
  void tell_waiting(const std::string& text);
  /// Any thread may call it.
  std::vector<std::size_t> neighbours() const;
  /// Whether everything has arrived that was sent, and each server core has said since the last call that it has
  /// nothing under way for this rank. If `ask`, asks them again.
  bool is_idle(bool ask);
  /// Sends a message without payload to each core of the servers in other processes, over a connection of class 0.
  void tell_servers(const wire::Header& message);
  /// When each rank's process last gave a sign of life, over whatever connection. 0: ranks that are no neighbours, or
  /// leave.
  std::vector<std::int64_t> signs_of_life() const;
  /// When the process last gave a sign of life that has been silent for longest: a rank, by signs_of_life(), or a
  /// dedicated server that was asked.
  std::int64_t longest_silence_ns(std::span<const std::int64_t> signs_ns) const;
  /// What the rank's machine has answered over the connection that has waited the least.
  Flow::Answer answer_of(std::size_t rank) const;
  /// Checks whether something has been sent since the last call. That counts as progress, too.
  void note_traffic();
  /// The last time at which something arrived or left, by the monotonic clock. Any thread may call it.
  std::int64_t last_progress_ns() const { return last_progress_ns_.load(std::memory_order_relaxed); }
  /// Whether a peer's message may come over this connection: from the peer itself, or passed on within this machine.
  bool may_bring(const LinkState& link, const wire::Header& header) const;
  /// Adds an event of the connection to the flight recorder.
  void note(FlightEvent::Kind kind, const LinkState& link, const char* what, const wire::Header* about = nullptr);

  // Texts for messages and records.
  /// Names this rank, such as "rank 1 on HOST". Any thread may call it.
  std::string here() const;
  /// Names a rank, such as "rank 1 on HOST".
  std::string name_of_rank(std::size_t rank) const {
    loop_->check_thread();
    return name_of(LinkKind::peer, rank);
  }
  /// Names the process at the other end, with its address.
  std::string describe(const LinkState& link) const;
  /// Names the processes that have not greeted yet.
  std::string not_linked() const;
  /// Text such as "; last heard of rank 2 31.2 s ago, rank 1 12 ms ago". It names each process once, and the one that
  /// has been silent for longest comes first.
  std::string last_heard() const;
  /// What is to be looked at when a connection has ended for the transport's `reason`.
  std::string what_to_check(const std::string& reason) const;
  /// The same where nothing comes through to a machine any more.
  std::string where_it_is_cut() const;
  /// All connections to known processes. Those that have ended come first.
  std::vector<LinkReport> reports() const;
  /// Any thread, once connect() has returned.
  const std::string& run() const { return endpoints_.run; }
  /// Whether connect() has been called.
  bool has_endpoints() const { return !loop_->checked(endpoints_).peers.empty(); }

 private:
  void adopt(std::shared_ptr<Flow> flow, LinkKind kind, std::size_t index, std::size_t lane, bool greet);
  void watch_pending(const std::shared_ptr<Flow>& flow);
  void end(LinkState& link);
  void await_peer(std::size_t rank);
  bool is_neighbour(std::size_t rank) const;
  void dial(const Endpoints::Transports& transports, const std::string& address, LinkKind kind, std::size_t index,
            std::size_t lane);
  /// Calls visit_link(link) for each open connection that has greeted: to one server or peer, or to a rank's process.
  template <typename Visit>
  void visit(LinkKind kind, std::size_t index, const Visit& visit_link) const;
  template <typename Visit>
  void visit(std::size_t rank, const Visit& visit_link) const;
  template <typename Visit>
  void visit_neighbours(const Visit& visit_link);
  void send_heartbeat(LinkState& link, std::uint32_t level);
  void send_uncounted(LinkState& link, const wire::Header& header, std::shared_ptr<const std::string> text);
  void dial_server(std::size_t index, const std::vector<std::string>& addresses);
  Status greeted_by_peer(LinkState& link, const wire::Hello& hello);
  void greeted_by_server(LinkState& link, const wire::Hello& hello);
  void send_hello(Flow& flow, std::size_t lane);
  std::optional<wire::Hello::Host> own_host() const;
  void mark(Flow& flow, std::size_t priority_class);
  std::string host_of(LinkKind kind, std::size_t index) const;
  std::string name_of(LinkKind kind, std::size_t index) const;
  LinkReport report_of(const LinkState& link, bool connected) const;

  const Options& options_;
  const bool colocated_;             // servers are embedded in the workers
  const bool connects_all_servers_;  // and not only those that a plan uses
  const std::string host_;           // this machine's name
  Receiver& receiver_;
  const Callbacks callbacks_;
  const std::shared_ptr<Loop> loop_;
  const std::unique_ptr<Lobby> lobby_;
  std::atomic<std::int64_t> last_progress_ns_{0};

  Links links_;
  InsertionMap<const Flow, LinkState> flows_;
  Endpoints endpoints_;
  Clock::time_point server_deadline_;  // for connecting to servers
  Clock::time_point peer_deadline_;    // for connecting to peers
  std::mt19937 jitter_;                // spreads the workers that a server has cut off
  bool connects_all_peers_ = false;
  std::size_t awaited_lanes_ = 0;  // that have been dialled, or will be by their peers, and have not greeted
  std::size_t greeted_peer_lanes_ = 0;
  bool servers_save_ = false;
  bool closing_ = false;
  wire::Header last_message_;  // once it is closing
  std::shared_ptr<const std::string> last_text_;
  bool told_of_marks_ = false;  // the user knows that the system does not permit to mark packets
  FlightRecorder recorder_;
  std::vector<LinkReport> ended_links_;
  std::uint64_t known_bytes_sent_ = 0;  // at the last call of note_traffic()
  std::uint64_t heartbeat_bytes_sent_ = 0;
  TrafficStats closed_traffic_;  // of connections that have ended
};

}  // namespace poseidon
