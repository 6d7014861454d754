// How one thread per side best moves a byte stream through TCP on this kernel: blocking calls, epoll as
// src/transport/tcp/tcp_flow.cc does it, MSG_ZEROCOPY, io_uring. Two threads, messages of 256 KiB that go round memory
// of 64 MiB at each end. Prints rate, CPU time of both sides per gigabyte, and the ratios to the blocking calls of the
// same round; medians of alternating rounds. What the kernel's ksoftirqd threads do for the packets is not counted.
//
// Usage: socket_bench [mib_per_round] [round_count] [case] [address receiver_namespace sender_namespace]
// case: only those whose name contains this text ("" for all); the blocking calls always run.
// Between two namespaces, over a veth pair (slower with the line of tc; then take fewer MiB per round):
//   ip netns add ra; ip netns add rb; ip link add va netns ra type veth peer name vb netns rb
//   ip -n ra addr add 10.77.0.1/24 dev va; ip -n ra link set va up
//   ip -n rb addr add 10.77.0.2/24 dev vb; ip -n rb link set vb up
//   tc -n rb qdisc add dev vb root tbf rate 5gbit burst 512k latency 20ms
//   socket_bench 512 5 "" 10.77.0.1 ra rb; ip netns del ra; ip netns del rb
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>
#ifdef POSEIDON_HAVE_LIBURING
#include <liburing.h>
#endif

#include "base/file_descriptor.h"

namespace poseidon {
namespace {

constexpr std::size_t kMessageBytes = 256u << 10;
constexpr std::size_t kMemoryBytes = 64u << 20;
constexpr std::size_t kWriteBudgetBytes = 2u << 20;
constexpr std::size_t kReadBudgetBytes = 256u << 10;
// Less than the notifications that the kernel holds for one socket by default.
constexpr std::uint64_t kZeroCopyLimit = 64;
constexpr std::size_t kLowWaterBytes = 64u << 10;
constexpr unsigned kRoundTimeLimitSeconds = 120;

enum class Way { blocking, epoll, epoll_zero_copy, uring, uring_zero_copy, uring_buffers, uring_buffers_in_place };

struct Case {
  const char* name;
  Way send;
  Way receive;
  int flow_count = 1;
  bool write_low_water = true;  // TCP_NOTSENT_LOWAT
  bool read_low_water = false;  // SO_RCVLOWAT
};

constexpr Case kCases[] = {
    {"a blocking", Way::blocking, Way::blocking, 1, false, false},
    {"a blocking, NOTSENT_LOWAT", Way::blocking, Way::blocking},
    {"b epoll", Way::epoll, Way::epoll},
    {"b epoll, RCVLOWAT", Way::epoll, Way::epoll, 1, true, true},
    {"b epoll, RCVLOWAT, 2 flows", Way::epoll, Way::epoll, 2, true, true},
    {"b epoll, RCVLOWAT, 4 flows", Way::epoll, Way::epoll, 4, true, true},
    {"b epoll, RCVLOWAT, 8 flows", Way::epoll, Way::epoll, 8, true, true},
#ifdef POSEIDON_HAVE_LIBURING
    {"c io_uring", Way::uring, Way::uring},
    {"c io_uring, RCVLOWAT", Way::uring, Way::uring, 1, true, true},
    {"c io_uring, RCVLOWAT, 2 flows", Way::uring, Way::uring, 2, true, true},
    {"c io_uring, RCVLOWAT, 4 flows", Way::uring, Way::uring, 4, true, true},
    {"c io_uring, RCVLOWAT, 8 flows", Way::uring, Way::uring, 8, true, true},
    {"c io_uring, multishot, copied out", Way::uring, Way::uring_buffers},
    {"c io_uring, multishot, in place", Way::uring, Way::uring_buffers_in_place},
    {"c io_uring SEND_ZC, RCVLOWAT", Way::uring_zero_copy, Way::uring, 1, true, true},
    {"c epoll sends, io_uring receives", Way::epoll, Way::uring, 1, true, true},
    {"c io_uring sends, epoll receives", Way::uring, Way::epoll, 1, true, true},
#endif
    {"d MSG_ZEROCOPY, epoll, RCVLOWAT", Way::epoll_zero_copy, Way::epoll, 1, true, true},
};

bool uses_uring(const Case& which) { return which.send >= Way::uring || which.receive >= Way::uring; }

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "socket_bench: %s failed: %s\n", what, errno_text(errno).c_str());
  std::exit(1);
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

void set_option(int fd, int level, int name, int value) {
  check(::setsockopt(fd, level, name, &value, sizeof(value)) == 0, "setsockopt");
}

/// One flow's end: its socket, the part of the memory that it goes round, and how far it has come.
struct Lane {
  FileDescriptor socket;
  std::span<std::byte> memory;
  std::size_t left_bytes = 0;
  std::size_t position_bytes = 0;  // in memory
  std::size_t low_water_bytes = 1;
  std::uint64_t pending_count = 0;  // zero-copy sends whose memory the kernel may still read
  std::uint64_t done_count = 0;     // and those it has done with,
  std::uint64_t copied_count = 0;   // of which it copied so many after all

  /// The rest of the current message.
  std::span<std::byte> next(std::size_t limit_bytes = kMessageBytes) const {
    return memory.subspan(position_bytes, std::min(limit_bytes, kMessageBytes - position_bytes % kMessageBytes));
  }
  bool unfinished() const { return left_bytes > 0 || pending_count > 0; }
  void advance(std::size_t bytes) {
    check(bytes <= left_bytes, "count of bytes");
    left_bytes -= bytes;
    position_bytes = (position_bytes + bytes) % memory.size();
  }
};

using Lanes = std::span<Lane>;

bool any_unfinished(Lanes lanes) { return std::ranges::any_of(lanes, &Lane::unfinished); }

/// Sends or receives a part of the current message. Returns false if the socket would block, or has no room for more
/// notifications of zero-copy sends.
bool move_part(Lane& lane, bool sends, int flags, std::size_t& budget_bytes) {
  const auto piece = lane.next(budget_bytes);
  const ssize_t moved = sends ? ::send(lane.socket.get(), piece.data(), piece.size(), flags | MSG_NOSIGNAL)
                              : ::recv(lane.socket.get(), piece.data(), piece.size(), flags);
  if (moved < 0 && (would_block() || ((flags & MSG_ZEROCOPY) != 0 && errno == ENOBUFS))) return false;
  check(moved > 0, sends ? "send" : "recv");
  const auto moved_bytes = static_cast<std::size_t>(moved);
  lane.advance(moved_bytes);
  budget_bytes -= moved_bytes;
  if ((flags & MSG_ZEROCOPY) != 0) ++lane.pending_count;
  return (flags & MSG_DONTWAIT) == 0 || moved_bytes == piece.size();  // after a part, the next try would say EAGAIN
}

void move_blocking(Lane& lane, bool sends) {
  std::size_t budget_bytes = lane.left_bytes;
  while (lane.left_bytes > 0) move_part(lane, sends, 0, budget_bytes);
}

/// One wake-up's share.
void move_some(Lane& lane, bool sends, int flags) {
  std::size_t budget_bytes = std::min(lane.left_bytes, sends ? kWriteBudgetBytes : kReadBudgetBytes);
  while (budget_bytes > 0 && move_part(lane, sends, flags | MSG_DONTWAIT, budget_bytes)) continue;
}

/// Level-triggered epoll over all lanes; the data of an event is the lane's index.
class Watch {
 public:
  Watch(Lanes lanes, std::uint32_t events) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    for (std::size_t i = 0; i < lanes.size(); ++i) control(EPOLL_CTL_ADD, lanes[i], i, events);
  }
  void change(const Lane& lane, std::size_t index, std::uint32_t events) {
    control(EPOLL_CTL_MOD, lane, index, events);
  }
  std::span<const epoll_event> wait() {
    const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), -1);
    check(count > 0, "epoll_wait");
    return std::span(events_).first(static_cast<std::size_t>(count));
  }

 private:
  void control(int operation, const Lane& lane, std::size_t index, std::uint32_t events) {
    epoll_event event{.events = events, .data = {.u64 = index}};
    check(::epoll_ctl(epoll_.get(), operation, lane.socket.get(), &event) == 0, "epoll_ctl");
  }

  FileDescriptor epoll_;
  std::array<epoll_event, 64> events_{};
};

void read_notifications(Lane& lane) {
  for (;;) {
    std::array<std::byte, 256> control{};
    msghdr message{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(lane.socket.get(), &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return check(would_block(), "recvmsg");
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    check(header != nullptr, "error queue's control message");
    sock_extended_err error{};
    std::memcpy(&error, CMSG_DATA(header), sizeof(error));
    check(error.ee_errno == 0 && error.ee_origin == SO_EE_ORIGIN_ZEROCOPY, "zero-copy send");
    const std::uint32_t count = error.ee_data - error.ee_info + 1;
    lane.pending_count -= count;
    lane.done_count += count;
    if ((error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0) lane.copied_count += count;
  }
}

void send_epoll(Lanes lanes, bool zero_copy) {
  for (const Lane& lane : lanes) set_option(lane.socket.get(), SOL_SOCKET, SO_ZEROCOPY, zero_copy ? 1 : 0);
  Watch watch(lanes, EPOLLOUT);
  while (any_unfinished(lanes)) {
    for (const epoll_event& event : watch.wait()) {
      Lane& lane = lanes[event.data.u64];
      const bool notified = (event.events & EPOLLERR) != 0;
      if (notified) read_notifications(lane);
      move_some(lane, true, zero_copy ? MSG_ZEROCOPY : 0);
      const bool full = lane.pending_count >= kZeroCopyLimit || lane.left_bytes == 0;
      if (notified || full) watch.change(lane, event.data.u64, full ? 0u : EPOLLOUT);  // EPOLLERR comes all the same
    }
  }
}

void receive_epoll(Lanes lanes, bool low_water) {
  Watch watch(lanes, EPOLLIN);
  while (any_unfinished(lanes)) {
    for (const epoll_event& event : watch.wait()) {
      Lane& lane = lanes[event.data.u64];
      move_some(lane, false, 0);
      if (lane.left_bytes == 0) watch.change(lane, event.data.u64, 0);
      const std::size_t wanted_bytes = lane.next(kLowWaterBytes).size();
      if (!low_water || wanted_bytes == lane.low_water_bytes) continue;
      lane.low_water_bytes = wanted_bytes;
      set_option(lane.socket.get(), SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(wanted_bytes));
    }
  }
}

#ifdef POSEIDON_HAVE_LIBURING
constexpr unsigned kRingEntries = 64;
constexpr unsigned kBufferCount = 16;
constexpr std::size_t kBufferBytes = 64u << 10;

/// Owns an io_uring of one thread.
class Ring {
 public:
  Ring()
      : error_(-::io_uring_queue_init(kRingEntries, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN)) {}
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (error_ == 0) ::io_uring_queue_exit(&ring_);
  }
  int error() const { return error_; }
  io_uring* get() { return &ring_; }
  io_uring_sqe* request() {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    check(entry != nullptr, "io_uring_get_sqe");
    return entry;
  }
  /// Submits what was requested, waits for one completion or more, and handles all that are there.
  template <typename Handle>
  void turn(Handle handle) {
    check(::io_uring_submit_and_wait(&ring_, 1) >= 0, "io_uring_submit_and_wait");
    std::array<io_uring_cqe*, kRingEntries> entries{};
    const unsigned count = ::io_uring_peek_batch_cqe(&ring_, entries.data(), kRingEntries);
    for (const io_uring_cqe* entry : std::span(entries).first(count)) handle(*entry);
    ::io_uring_cq_advance(&ring_, count);
  }

 private:
  io_uring ring_{};
  int error_;
};

/// One request per lane at a time, of a whole message.
void move_uring(Lanes lanes, bool sends, bool zero_copy, bool low_water) {
  Ring ring;
  const auto start = [&](std::size_t i) {
    const int fd = lanes[i].socket.get();
    const auto piece = lanes[i].next();
    io_uring_sqe* entry = ring.request();
    if (zero_copy) {
      ::io_uring_prep_send_zc(entry, fd, piece.data(), piece.size(), MSG_NOSIGNAL | MSG_WAITALL, 0);
    } else if (sends) {
      ::io_uring_prep_send(entry, fd, piece.data(), piece.size(), MSG_NOSIGNAL | MSG_WAITALL);
    } else {
      ::io_uring_prep_recv(entry, fd, piece.data(), piece.size(), MSG_WAITALL);
    }
    ::io_uring_sqe_set_data64(entry, i);
  };
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    if (low_water) set_option(lanes[i].socket.get(), SOL_SOCKET, SO_RCVLOWAT, kLowWaterBytes);
    start(i);
  }
  while (any_unfinished(lanes)) {
    ring.turn([&](const io_uring_cqe& done) {
      Lane& lane = lanes[done.user_data];
      if ((done.flags & IORING_CQE_F_NOTIF) != 0) {
        --lane.pending_count;
        return;
      }
      errno = -done.res;
      check(done.res > 0, "io_uring send or recv");
      lane.advance(static_cast<std::size_t>(done.res));
      if ((done.flags & IORING_CQE_F_MORE) != 0) ++lane.pending_count;
      if (lane.left_bytes > 0) start(done.user_data);
    });
  }
}

/// The kernel picks the buffers; in_place leaves the data there, as a receiver that adds it up at once would.
void receive_uring_buffers(Lanes lanes, bool in_place) {
  struct Page {
    alignas(4096) std::array<std::byte, 4096> bytes{};
  };
  Ring ring;
  std::vector<std::byte> buffers(kBufferBytes * kBufferCount, std::byte{1});
  std::vector<Page> ring_memory(1);
  auto* buffer_ring = reinterpret_cast<io_uring_buf_ring*>(ring_memory.data());
  io_uring_buf_reg registration{};
  registration.ring_addr = reinterpret_cast<std::uintptr_t>(buffer_ring);
  registration.ring_entries = kBufferCount;
  check(::io_uring_register_buf_ring(ring.get(), &registration, 0) == 0, "io_uring_register_buf_ring");
  const auto give = [&](unsigned id) {
    ::io_uring_buf_ring_add(buffer_ring, buffers.data() + id * kBufferBytes, kBufferBytes,
                            static_cast<unsigned short>(id), ::io_uring_buf_ring_mask(kBufferCount), 0);
    ::io_uring_buf_ring_advance(buffer_ring, 1);
  };
  const auto start = [&](std::size_t i) {
    io_uring_sqe* entry = ring.request();
    ::io_uring_prep_recv_multishot(entry, lanes[i].socket.get(), nullptr, 0, 0);
    entry->flags |= IOSQE_BUFFER_SELECT;
    ::io_uring_sqe_set_data64(entry, i);
  };
  const auto take = [&](Lane& lane, std::span<const std::byte> data) {
    while (!data.empty()) {
      const auto piece = lane.next(data.size());
      if (!in_place) std::memcpy(piece.data(), data.data(), piece.size());
      lane.advance(piece.size());
      data = data.subspan(piece.size());
    }
  };
  for (unsigned id = 0; id < kBufferCount; ++id) give(id);
  for (std::size_t i = 0; i < lanes.size(); ++i) start(i);
  while (any_unfinished(lanes)) {
    ring.turn([&](const io_uring_cqe& done) {
      Lane& lane = lanes[done.user_data];
      errno = -done.res;
      check(done.res > 0 || done.res == -ENOBUFS || (done.res == 0 && lane.left_bytes == 0), "io_uring recv");
      if (done.res > 0) {
        const unsigned id = done.flags >> IORING_CQE_BUFFER_SHIFT;
        take(lane, std::span(buffers).subspan(id * kBufferBytes, static_cast<std::size_t>(done.res)));
        give(id);
      }
      if ((done.flags & IORING_CQE_F_MORE) == 0 && lane.left_bytes > 0) start(done.user_data);
    });
  }
}
#endif

void move(const Case& which, bool sends, Lanes lanes) {
  const Way way = sends ? which.send : which.receive;
  if (way == Way::blocking) return move_blocking(lanes[0], sends);
#ifdef POSEIDON_HAVE_LIBURING
  if (way == Way::uring || way == Way::uring_zero_copy) {
    return move_uring(lanes, sends, way == Way::uring_zero_copy, !sends && which.read_low_water);
  }
  if (way >= Way::uring_buffers) return receive_uring_buffers(lanes, way == Way::uring_buffers_in_place);
#endif
  sends ? send_epoll(lanes, way == Way::epoll_zero_copy) : receive_epoll(lanes, which.read_low_water);
}

struct Setup {
  std::size_t round_bytes = 1u << 30;
  int round_count = 5;
  std::string_view wanted;
  const char* address = "127.0.0.1";
  std::array<const char*, 2> namespaces{};  // receiver's, sender's; null: this one
};

void enter_namespace(const char* name) {
  if (name == nullptr) return;
  const FileDescriptor file(::open((std::string("/run/netns/") + name).c_str(), O_RDONLY | O_CLOEXEC));
  check(::setns(file.get(), CLONE_NEWNET) == 0, "setns");
}

FileDescriptor new_socket() {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(static_cast<bool>(socket), "socket");
  return socket;
}

/// One side's sockets. The receiver listens and tells the sender its port.
std::vector<Lane> connected_lanes(const Setup& setup, const Case& which, bool sends, std::promise<in_port_t>& port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  check(::inet_pton(AF_INET, setup.address, &address.sin_addr) == 1, "reading the address");
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  const FileDescriptor listener = new_socket();
  if (sends) {
    address.sin_port = port.get_future().get();
  } else {
    check(::bind(listener.get(), generic, length) == 0 && ::listen(listener.get(), 16) == 0, "listen");
    check(::getsockname(listener.get(), generic, &length) == 0, "getsockname");
    port.set_value(address.sin_port);
  }
  std::vector<Lane> lanes(static_cast<std::size_t>(which.flow_count));
  for (Lane& lane : lanes) {
    lane.socket = sends ? new_socket() : FileDescriptor(::accept(listener.get(), nullptr, nullptr));
    if (sends) check(::connect(lane.socket.get(), generic, length) == 0, "connect");
    set_option(lane.socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
    if (which.write_low_water) set_option(lane.socket.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, kLowWaterBytes);
  }
  return lanes;
}

struct Sample {
  double mb_per_s = 0;
  double cpu_s_per_gb = 0;
  double copied_share = 0;  // of the zero-copy sends
};

/// Both sides' time, user and system.
double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Sample measure(const Setup& setup, const Case& which, std::array<std::vector<std::byte>, 2>& memories) {
  std::promise<in_port_t> port;
  std::barrier<> connected(3);
  Sample sample;
  const auto run_side = [&](bool sends) {
    enter_namespace(setup.namespaces[sends ? 1 : 0]);
    std::vector<Lane> lanes = connected_lanes(setup, which, sends, port);
    const std::size_t share_bytes = kMemoryBytes / lanes.size();
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i].memory = std::span(memories[sends ? 1 : 0]).subspan(i * share_bytes, share_bytes);
      lanes[i].left_bytes = setup.round_bytes / lanes.size();
    }
    connected.arrive_and_wait();
    move(which, sends, lanes);
    for (const Lane& lane : lanes) {
      if (lane.done_count == 0) continue;
      sample.copied_share +=
          static_cast<double>(lane.copied_count) / static_cast<double>(lane.done_count * lanes.size());
    }
  };
  ::alarm(kRoundTimeLimitSeconds);
  std::thread receiver(run_side, false);
  std::thread sender(run_side, true);
  connected.arrive_and_wait();
  const auto start = std::chrono::steady_clock::now();
  const double start_cpu_seconds = cpu_seconds();
  receiver.join();
  sender.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const auto bytes = static_cast<double>(setup.round_bytes);
  sample.mb_per_s = bytes / elapsed.count() / 1e6;
  sample.cpu_s_per_gb = (cpu_seconds() - start_cpu_seconds) / (bytes / 1e9);
  return sample;
}

double median(const std::vector<Sample>& samples, const std::vector<Sample>& bases, double Sample::*field, bool ratio) {
  std::vector<double> values;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    values.push_back(samples[i].*field / (ratio ? bases[i].*field : 1));
  }
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void print_row(const char* name, const std::vector<Sample>& samples, const std::vector<Sample>& bases) {
  const auto value = [&](double Sample::*field, bool ratio) { return median(samples, bases, field, ratio); };
  std::printf("%-33s %7.0f %6.2f %9.3f %6.2f", name, value(&Sample::mb_per_s, false), value(&Sample::mb_per_s, true),
              value(&Sample::cpu_s_per_gb, false), value(&Sample::cpu_s_per_gb, true));
  const double copied_share = value(&Sample::copied_share, false);
  std::printf(copied_share > 0 ? "  (%.0f %% copied)\n" : "\n", 100 * copied_share);
}

std::vector<const Case*> chosen_cases(const Setup& setup) {
  bool uring_allowed = false;
#ifdef POSEIDON_HAVE_LIBURING
  const int error = Ring().error();
  uring_allowed = error == 0;
  if (!uring_allowed) std::printf("io_uring is not available: %s\n", errno_text(error).c_str());
#else
  std::puts("built without liburing: io_uring is not measured");
#endif
  std::vector<const Case*> chosen;
  for (const Case& which : kCases) {
    const bool wanted = chosen.empty() || std::string_view(which.name).find(setup.wanted) != std::string_view::npos;
    if (wanted && (uring_allowed || !uses_uring(which))) chosen.push_back(&which);
  }
  return chosen;
}

int run(int argument_count, char** arguments) {
  Setup setup;
  if (argument_count > 1) setup.round_bytes = std::strtoull(arguments[1], nullptr, 10) << 20;
  if (argument_count > 2) setup.round_count = std::atoi(arguments[2]);
  if (argument_count > 3) setup.wanted = arguments[3];
  if (argument_count > 4) setup.address = arguments[4];
  if (argument_count > 6) setup.namespaces = {arguments[5], arguments[6]};
  errno = EINVAL;
  check(setup.round_bytes >= kMemoryBytes && setup.round_bytes % kMemoryBytes == 0, "mib_per_round: multiple of 64");
  check(setup.round_count > 0, "round_count");
  const std::vector<const Case*> cases = chosen_cases(setup);
  std::array<std::vector<std::byte>, 2> memories;
  memories.fill(std::vector<std::byte>(kMemoryBytes, std::byte{1}));
  std::vector<std::vector<Sample>> samples(cases.size());
  for (int round = 0; round < setup.round_count; ++round) {
    for (std::size_t i = 0; i < cases.size(); ++i) samples[i].push_back(measure(setup, *cases[i], memories));
  }
  std::printf("%-33s %7s %6s %9s %6s\n", "", "MB/s", "ratio", "CPU s/GB", "ratio");
  for (std::size_t i = 0; i < cases.size(); ++i) print_row(cases[i]->name, samples[i], samples[0]);
  return 0;
}

}  // namespace
}  // namespace poseidon

int main(int argument_count, char** arguments) { return poseidon::run(argument_count, arguments); }
