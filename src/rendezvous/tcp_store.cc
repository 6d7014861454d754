#include "rendezvous/tcp_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/host.h"
#include "base/one_thread.h"
#include "base/thread.h"
#include "base/wipe.h"
#include "rendezvous/store_protocol.h"
#include "rendezvous/store_server.h"
#include "transport/admission.h"
#include "transport/byte_stream.h"
#include "transport/connection_handshake.h"
#include "transport/tcp/address.h"
#include "transport/tcp/socket_option.h"

namespace poseidon {

using namespace store_protocol;

namespace {

constexpr std::chrono::milliseconds kAskAgain{20};
constexpr std::chrono::milliseconds kDialAgain{100};
constexpr std::chrono::milliseconds kLeastLook{100};  // and twice as long after each that was not answered
constexpr std::chrono::milliseconds kAnswerTime{
    1'000};  // that a get gives the server at least, unless it is a quick look
constexpr std::chrono::milliseconds kSetTime{2'000};
constexpr std::chrono::seconds kAttemptTime{5};

std::string where(const Options& options) { return host_and_port(options.master_addr, options.master_port); }

/// The addresses of `master_addr` at this moment. A name may get one later, or another one with another machine.
Result<std::vector<tcp::SocketAddress>> master_addresses(const Options& options) {
  auto found = tcp::resolve(where(options));
  if (found.ok()) return found;
  return Status(ErrorCode::unreachable, "MASTER_ADDR '" + options.master_addr + "' is not an address that resolves (" +
                                            found.status().message() + "); set it to rank 0's host name or address");
}

/// Waits for `events`. Returns false if the deadline has passed.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

Status unreachable(int error) { return {ErrorCode::unreachable, errno_text(error)}; }

Result<ByteStream> shake_hands(FileDescriptor socket, const Admission& admission, const std::string& who,
                               Clock::time_point deadline) {
  const int fd = socket.get();
  ConnectionHandshake handshake(wire::Handshake::Role::connector, wire::Purpose::store, admission);
  for (;;) {
    switch (handshake.advance(fd)) {
      case HandshakeStep::waiting:
        if (!wait_for(fd, POLLIN, deadline)) return unreachable(ETIMEDOUT);
        break;
      case HandshakeStep::ended:
        return unreachable(ECONNRESET);
      case HandshakeStep::failed:
        return Status(ErrorCode::unreachable, handshake.failure());
      case HandshakeStep::over:
        if (handshake.state() == wire::Handshake::State::done)
          return ByteStream(std::move(socket), handshake.take_tls());
        return wire::handshake_error(handshake.state(), who);
    }
  }
}

/// Tries once to connect to an address. ErrorCode::unreachable: another try may succeed.
Result<ByteStream> dial_one(const tcp::SocketAddress& address, const Admission& admission, const std::string& who,
                            Clock::time_point deadline) {
  FileDescriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return unreachable(errno);
  const bool connected = ::connect(socket.get(), address.get(), address.size_bytes) == 0;
  if (!connected && errno != EINPROGRESS) return unreachable(errno);
  if (!connected && !wait_for(socket.get(), POLLOUT, deadline)) return unreachable(ETIMEDOUT);
  if (const int error = tcp::connect_error(socket.get()); error != 0) return unreachable(error);
  tcp::set_option(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return shake_hands(std::move(socket), admission, who, deadline);
}

/// The same for one address after the other.
Result<ByteStream> dial(const std::vector<tcp::SocketAddress>& addresses, const Admission& admission,
                        const std::string& who, Clock::time_point deadline) {
  Status status = unreachable(EADDRNOTAVAIL);
  for (const auto& address : addresses) {
    auto stream = dial_one(address, admission, who, deadline);
    if (stream.ok() || stream.status().code() != ErrorCode::unreachable) return stream;
    status = stream.status();
  }
  return status;
}

/// Whether MASTER_ADDR says itself that all ranks are on one machine.
bool is_of_one_machine(const std::string& master_addr) {
  in6_addr parsed{};
  return master_addr.starts_with("localhost") || ::inet_pton(AF_INET, master_addr.c_str(), &parsed) == 1 ||
         ::inet_pton(AF_INET6, master_addr.c_str(), &parsed) == 1;
}

/// Serves at the first address that is this machine's. Where that is a loopback address only because this machine's
/// list of hosts says so for its own name, other machines know the name as another address: it is served at all.
Result<std::unique_ptr<StoreServer>> serve_at(const std::vector<tcp::SocketAddress>& addresses, const Options& options,
                                              const Admission& admission) {
  Status status = unreachable(EADDRNOTAVAIL);
  const bool open = !options.interfaces.empty() && !is_of_one_machine(options.master_addr);
  for (const auto& address : addresses) {
    const bool hidden = open && tcp::is_loopback(address);
    auto server = StoreServer::listen(hidden ? tcp::any_address(address) : address, admission);
    if (server.ok()) return server;
    status = server.status();
  }
  return status;
}

/// One connection to the server. It asks again and again for a key that is not there yet, because ranks are few and
/// meet once.
class TcpStore final : public Store {
 public:
  TcpStore(const Options& options, Admission admission, std::unique_ptr<StoreServer> server)
      : server_(std::move(server)),
        options_(options),
        admission_(std::move(admission)),
        timeout_(options.timeout),
        where_("the rendezvous store at " + where(options)) {
    wipe(options_.secret);  // which only the admission needs
  }

  /// Connects. While nobody serves there, it tries again until the deadline.
  Status reach(Clock::time_point deadline, const std::function<bool()>& keep_waiting) {
    for (;;) {
      const auto now = Clock::now();
      const auto addresses = master_addresses(options_);
      auto stream = addresses.ok() ? dial(addresses.value(), admission_, where_,
                                          std::min(std::max(deadline, now + quick_look_), now + kAttemptTime))
                                   : Result<ByteStream>(addresses.status());
      if (stream.ok()) {
        stream_ = std::move(stream.value());
        reached_ = true;
        return {};
      }
      look_longer();
      if (stream.status().code() != ErrorCode::unreachable) return stream.status();
      if (addresses.ok() && take_over(addresses.value())) continue;
      if (!keep_waiting()) return {ErrorCode::aborted, "interrupted while connecting"};
      if (Clock::now() + kDialAgain > deadline)
        return {ErrorCode::unreachable,
                concat("rank ", options_.rank, " cannot reach ", where_, ": ", stream.status().message(),
                       "; check that rank 0 runs, MASTER_ADDR and MASTER_PORT, and firewalls")};
      pause_for(kDialAgain);
    }
  }

  Status set(const std::string& key, const std::string& value) override {
    const OneThread::Turn turn(one_thread_);
    // The store may be lost. A process that has written looks later whether it has arrived.
    const auto deadline = Clock::now() + std::min<std::chrono::milliseconds>(kSetTime, timeout_);
    return ask(kSet, key, value, deadline, deadline).status();
  }

  Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const OneThread::Turn turn(one_thread_);
    const auto begun = Clock::now();
    const auto deadline = begun + timeout;
    const auto answer_deadline = begun + (timeout.count() == 0 ? quick_look_ : std::max(timeout, kAnswerTime));
    for (;;) {
      auto answer = ask(kGet, key, "", deadline, answer_deadline);
      if (!answer.ok()) return answer.status();
      if (answer.value().has_value()) return std::move(*answer.value());
      if (Clock::now() + kAskAgain > deadline)
        return Status(ErrorCode::timeout, "the rendezvous store has no key '" + key + "' yet");
      pause_for(kAskAgain);
    }
  }

 private:
  using Answer = std::optional<std::string>;  // nullopt: no such key

  /// Starts to serve, if this is a process of rank 0's host and nobody else serves.
  bool take_over(const std::vector<tcp::SocketAddress>& addresses) {
    const bool may = options_.on_failure != OnFailure::abort && (options_.rank == 0 || reached_);
    if (server_ || !may) return false;
    auto served = serve_at(addresses, options_, admission_);
    if (served.ok()) server_ = std::move(served.value());
    return served.ok();
  }

  /// Repeats the request until the first deadline if connections end. An answer may take until the second deadline.
  Result<Answer> ask(char op, const std::string& key, const std::string& value, Clock::time_point deadline,
                     Clock::time_point answer_deadline) {
    if (key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes)
      return Status(ErrorCode::invalid_argument, "key or value too large for the rendezvous store");
    const std::string request = store_protocol::to_text({op, key, value});
    for (;;) {
      if (!stream_) {
        if (Status status = reach(deadline, [] { return true; }); !status.ok()) return status;
      }
      auto answer = exchange(request, answer_deadline);
      if (answer.ok()) quick_look_ = kLeastLook;
      if (answer.ok() || answer.status().code() == ErrorCode::refused) return answer;
      look_longer();
      stream_.close();  // a late answer would be taken for the answer to the next request
      // That no answer has come does not mean that there is no such key.
      if (answer.status().code() == ErrorCode::timeout)
        return Status(ErrorCode::unreachable, answer.status().message());
      if (Clock::now() >= deadline) return answer;
    }
  }

  /// A server that many ask at once takes longer to answer. If all gave up early and asked again, it never would.
  void look_longer() {
    quick_look_ = std::min(2 * quick_look_, std::max(kLeastLook, std::min(kSetTime, timeout_ / 10)));
  }

  Result<Answer> exchange(const std::string& request, Clock::time_point deadline) {
    if (Status status = send_all(request, deadline); !status.ok()) return status;
    std::array<char, sizeof(std::uint32_t)> size{};
    if (Status status = receive_all(size, deadline); !status.ok()) return status;
    const std::uint32_t value_bytes = read_u32(size.data());
    if (value_bytes == kNoSuchKey) return Answer();
    if (value_bytes == kFull)
      return Status(ErrorCode::refused,
                    where_ + " is full; give jobs that do not belong together a MASTER_PORT of their own");
    if (value_bytes > kMaxValueBytes) return lost();
    std::string answer(value_bytes, '\0');
    if (Status status = receive_all(answer, deadline); !status.ok()) return status;
    return Answer(std::move(answer));
  }

  Status lost() const {
    return {ErrorCode::unreachable, where_ + " closed the connection; rank 0 has ended, see its output"};
  }
  Status silent() const { return {ErrorCode::timeout, where_ + " does not answer; see whether rank 0 is stopped"}; }

  Status send_all(std::span<const char> bytes, Clock::time_point deadline) {
    while (!bytes.empty() || stream_.has_unsent()) {
      // Sent bytes are only read, but iovec has no const form.
      std::array<iovec, 1> piece{{{const_cast<char*>(bytes.data()), bytes.size()}}};
      const Transfer sent = stream_.send(piece);
      if (sent.outcome == Transfer::Outcome::failed) return lost();
      bytes = bytes.subspan(sent.bytes);
      const bool full = !bytes.empty() || stream_.has_unsent();
      if (full && !wait_for(stream_.socket(), POLLOUT, deadline)) return silent();
    }
    return {};
  }

  Status receive_all(std::span<char> bytes, Clock::time_point deadline) {
    while (!bytes.empty()) {
      std::array<iovec, 1> piece{{{bytes.data(), bytes.size()}}};
      const Transfer got = stream_.receive(piece);
      if (got.outcome == Transfer::Outcome::blocked) {
        if (!wait_for(stream_.socket(), POLLIN, deadline)) return silent();
        continue;
      }
      if (got.outcome != Transfer::Outcome::done) return lost();
      bytes = bytes.subspan(got.bytes);
    }
    return {};
  }

  const KeepsTime keeps_time_;
  std::unique_ptr<StoreServer> server_;  // null if another process serves
  Options options_;
  const Admission admission_;
  const std::chrono::milliseconds timeout_;
  const std::string where_;
  ByteStream stream_;
  bool reached_ = false;
  std::chrono::milliseconds quick_look_ = kLeastLook;
  [[no_unique_address]] OneThread one_thread_{"TcpStore"};
};

Result<std::unique_ptr<StoreServer>> serve(const Options& options, const Admission& admission) {
  const auto addresses = master_addresses(options);
  if (!addresses.ok()) return addresses.status();
  auto server = serve_at(addresses.value(), options, admission);
  if (server.ok()) return server;
  return Status(ErrorCode::unreachable,
                "rank 0 cannot serve the rendezvous at " + where(options) + ": " + server.status().message() +
                    "; set MASTER_PORT to a free port and MASTER_ADDR to an address of rank 0's host");
}

}  // namespace

Result<std::shared_ptr<Store>> open_tcp_store(const Options& options, const std::function<bool()>& keep_waiting) {
  auto admission = admission_of(options);
  if (!admission.ok()) return admission.status();
  std::unique_ptr<StoreServer> server;
  Status cannot_serve;
  if (options.rank == 0) {
    const auto deadline = Clock::now() + options.timeout;
    auto served = serve(options, admission.value());
    // A name may get its address only when this machine has started: MASTER_ADDR of a pod.
    while (!served.ok() && !tcp::resolve(where(options)).ok() && Clock::now() + kDialAgain < deadline) {
      if (!keep_waiting()) return Status(ErrorCode::aborted, "interrupted while MASTER_ADDR did not resolve");
      pause_for(kDialAgain);
      served = serve(options, admission.value());
    }
    if (!served.ok()) cannot_serve = served.status();
    if (served.ok()) server = std::move(served.value());
  }
  // If rank 0 was lost before, another process of this host may already serve.
  if (!cannot_serve.ok() && options.on_failure == OnFailure::abort) return cannot_serve;
  const auto store = std::make_shared<TcpStore>(options, std::move(admission.value()), std::move(server));
  const Status reached = store->reach(Clock::now() + options.timeout, keep_waiting);
  if (!reached.ok()) return cannot_serve.ok() ? reached : cannot_serve;
  return std::shared_ptr<Store>(store);
}

}  // namespace poseidon
