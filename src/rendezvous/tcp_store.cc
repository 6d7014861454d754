#include "rendezvous/tcp_store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace poseidon {

namespace {

constexpr std::size_t kMaxKeyBytes = 4096;
constexpr std::size_t kMaxValueBytes = std::size_t{16} << 20;
constexpr std::size_t kRequestHeaderBytes = 9;
constexpr std::uint32_t kNoSuchKey = 0xffffffffu;
constexpr auto kAskAgain = std::chrono::milliseconds(20);

std::string where(const Options& options) { return options.master_addr + ":" + std::to_string(options.master_port); }

void append_u32(std::string& out, std::size_t value) {
  const auto narrow = static_cast<std::uint32_t>(value);
  out.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
}

std::uint32_t read_u32(const char* in) {
  std::uint32_t value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

/// First address that `master_addr` stands for.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  int family = AF_INET;
};

Result<Address> resolve(const Options& options) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(options.master_addr.c_str(), std::to_string(options.master_port).c_str(), &hints, &found);
  if (error != 0)
    return Status(ErrorCode::unreachable, "MASTER_ADDR '" + options.master_addr +
                                              "' is not an address that resolves (" + gai_strerror(error) +
                                              "); set it to rank 0's host name or address");
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  address.family = found->ai_family;
  freeaddrinfo(found);
  return address;
}

/// Waits for `events`; false when the deadline has passed.
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

/// Serves the map on a thread of its own. Values are small and few: one poll loop is enough.
class StoreServer {
 public:
  explicit StoreServer(FileDescriptor listener)
      : listener_(std::move(listener)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    thread_ = std::thread([this] { serve(); });
  }
  ~StoreServer() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

 private:
  struct Connection {
    FileDescriptor fd;
    std::string in;
    std::string out;
    bool broken = false;
  };

  void serve() {
    for (;;) {
      std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const auto& connection : connections_)
        entries.push_back(
            {connection.fd.get(), static_cast<short>(connection.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      if (::poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) return;
      if (entries[0].revents != 0) return;
      for (std::size_t i = 0; i < connections_.size(); ++i) {
        if ((entries[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(connections_[i]);
        if (!connections_[i].broken && (entries[i + 2].revents & POLLOUT) != 0) flush(connections_[i]);
      }
      if (entries[1].revents != 0) accept_all();
      std::erase_if(connections_, [](const Connection& connection) { return connection.broken; });
    }
  }

  void accept_all() {
    for (;;) {
      FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) return;
      connections_.emplace_back().fd = std::move(fd);
    }
  }

  void read_from(Connection& connection) {
    std::array<char, 16384> block{};
    for (;;) {
      const auto count = ::recv(connection.fd.get(), block.data(), block.size(), 0);
      if (count > 0) {
        connection.in.append(block.data(), static_cast<std::size_t>(count));
        while (!connection.broken && take_request(connection)) {
        }
        if (connection.broken) return;
        continue;
      }
      connection.broken = count == 0 || (errno != EAGAIN && errno != EINTR);
      return;
    }
  }

  /// Handles one complete request from the front of the buffer; false when there is none.
  bool take_request(Connection& connection) {
    if (connection.in.size() < kRequestHeaderBytes) return false;
    const char op = connection.in[0];
    const std::size_t key_bytes = read_u32(connection.in.data() + 1);
    const std::size_t value_bytes = read_u32(connection.in.data() + 5);
    if ((op != 'S' && op != 'G') || key_bytes > kMaxKeyBytes || value_bytes > kMaxValueBytes) {
      connection.broken = true;
      return false;
    }
    if (connection.in.size() < kRequestHeaderBytes + key_bytes + value_bytes) return false;
    std::string key = connection.in.substr(kRequestHeaderBytes, key_bytes);
    std::string value = connection.in.substr(kRequestHeaderBytes + key_bytes, value_bytes);
    connection.in.erase(0, kRequestHeaderBytes + key_bytes + value_bytes);
    if (op == 'S') {
      values_.emplace(key, std::move(value));
      append_u32(connection.out, 0);
    } else if (const auto found = values_.find(key); found != values_.end()) {
      append_u32(connection.out, found->second.size());
      connection.out += found->second;
    } else {
      append_u32(connection.out, kNoSuchKey);
    }
    flush(connection);
    return true;
  }

  void flush(Connection& connection) {
    while (!connection.out.empty()) {
      const auto count = ::send(connection.fd.get(), connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        connection.broken = errno != EAGAIN;
        return;
      }
      connection.out.erase(0, static_cast<std::size_t>(count));
    }
  }

  FileDescriptor listener_;
  FileDescriptor wake_;
  std::map<std::string, std::string> values_;
  std::vector<Connection> connections_;
  std::thread thread_;
};

/// One connection to the server. A key that is not there yet is asked for again and again: ranks
/// are few and meet once.
class TcpStore final : public Store {
 public:
  TcpStore(FileDescriptor fd, std::unique_ptr<StoreServer> server, std::chrono::milliseconds timeout, std::string where)
      : server_(std::move(server)), fd_(std::move(fd)), timeout_(timeout), where_(std::move(where)) {}

  Status set(const std::string& key, const std::string& value) override {
    auto answer = ask('S', key, value);
    return answer.ok() ? Status() : answer.status();
  }

  Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (;;) {
      auto answer = ask('G', key, "");
      if (!answer.ok()) return answer.status();
      if (answer.value().has_value()) return std::move(*answer.value());
      if (Clock::now() + kAskAgain > deadline)
        return Status(ErrorCode::timeout, "the rendezvous store has no key '" + key + "' yet");
      std::this_thread::sleep_for(kAskAgain);
    }
  }

 private:
  Status lost() const {
    return {ErrorCode::unreachable, "the rendezvous store at " + where_ + " closed the connection; rank 0 has ended"};
  }

  /// One request and its answer; nullopt: no such key.
  Result<std::optional<std::string>> ask(char op, const std::string& key, const std::string& value) {
    if (key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes)
      return Status(ErrorCode::invalid_argument, "key or value too large for the rendezvous store");
    std::string request(1, op);
    append_u32(request, key.size());
    append_u32(request, value.size());
    request += key + value;
    const auto deadline = Clock::now() + timeout_;
    if (Status status = send_all(request, deadline); !status.ok()) return status;
    std::array<char, 4> size{};
    if (Status status = receive_all(size, deadline); !status.ok()) return status;
    const std::uint32_t value_bytes = read_u32(size.data());
    if (value_bytes == kNoSuchKey) return std::optional<std::string>();
    if (value_bytes > kMaxValueBytes) return lost();
    std::string answer(value_bytes, '\0');
    if (Status status = receive_all(answer, deadline); !status.ok()) return status;
    return std::optional<std::string>(std::move(answer));
  }

  Status silent() const { return {ErrorCode::timeout, "the rendezvous store at " + where_ + " does not answer"}; }

  Status send_all(std::span<const char> bytes, Clock::time_point deadline) {
    while (!bytes.empty()) {
      const auto count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count >= 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(count));
      } else if (errno == EAGAIN) {
        if (!wait_for(fd_.get(), POLLOUT, deadline)) return silent();
      } else if (errno != EINTR) {
        return lost();
      }
    }
    return {};
  }

  Status receive_all(std::span<char> bytes, Clock::time_point deadline) {
    while (!bytes.empty()) {
      const auto count = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(count));
      } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
        return lost();
      } else if (!wait_for(fd_.get(), POLLIN, deadline)) {
        return silent();
      }
    }
    return {};
  }

  std::unique_ptr<StoreServer> server_;
  FileDescriptor fd_;
  std::chrono::milliseconds timeout_;
  std::string where_;
};

Result<std::unique_ptr<StoreServer>> serve_store(const Options& options, const Address& address) {
  FileDescriptor listener(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 ||
      ::listen(listener.get(), 1024) != 0)
    return Status(ErrorCode::unreachable,
                  "rank 0 cannot serve the rendezvous at " + where(options) + ": " + errno_text(errno) +
                      "; set MASTER_PORT to a free port and MASTER_ADDR to an address of rank 0's host");
  return std::make_unique<StoreServer>(std::move(listener));
}

/// Connects, again and again while nobody listens there yet.
Result<FileDescriptor> dial(const Options& options, const Address& address, const std::function<bool()>& keep_waiting) {
  const auto deadline = Clock::now() + options.timeout;
  std::string why = "no answer";
  for (;;) {
    FileDescriptor fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0) return fd;
    int error = errno;
    if (error == EINPROGRESS &&
        wait_for(fd.get(), POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(5)))) {
      socklen_t length = sizeof error;
      ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error == 0) return fd;
    }
    why = errno_text(error);
    if (!keep_waiting()) return Status(ErrorCode::aborted, "interrupted while connecting");
    if (Clock::now() + std::chrono::milliseconds(100) > deadline)
      return Status(ErrorCode::unreachable, "rank " + std::to_string(options.rank) +
                                                " cannot reach rank 0's rendezvous at " + where(options) + ": " + why +
                                                "; check that rank 0 runs, MASTER_ADDR and MASTER_PORT, and firewalls");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace

Result<std::shared_ptr<Store>> open_tcp_store(const Options& options, const std::function<bool()>& keep_waiting) {
  auto address = resolve(options);
  if (!address.ok()) return address.status();
  std::unique_ptr<StoreServer> server;
  if (options.rank == 0) {
    auto served = serve_store(options, address.value());
    if (!served.ok()) return served.status();
    server = std::move(served.value());
  }
  auto fd = dial(options, address.value(), keep_waiting);
  if (!fd.ok()) return fd.status();
  const int on = 1;
  ::setsockopt(fd.value().get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return std::shared_ptr<Store>(
      std::make_shared<TcpStore>(std::move(fd.value()), std::move(server), options.timeout, where(options)));
}

}  // namespace poseidon
