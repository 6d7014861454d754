// Measures how one thread per side best moves a byte stream through TCP on this kernel: blocking calls, epoll as in
// src/transport/tcp/tcp_flow.cc, MSG_ZEROCOPY, or io_uring. Messages of 256 KiB cycle through 64 MiB of memory at each
// end. Prints the rate, the CPU time of both sides per gigabyte (without ksoftirqd), and the ratios to the blocking
// calls of the same round, as medians of alternating rounds.
//
// Usage: socket_bench [mib_per_round] [round_count] [case] [address receiver_namespace sender_namespace]
// mib_per_round is a multiple of 64; case selects those whose name contains it, besides the blocking calls.
// Over a veth pair between two namespaces (the line of tc makes it slow):
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
#include <utility>
#include <vector>
#ifdef POSEIDON_HAVE_LIBURING
#include <liburing.h>
#endif

#include "base/file_descriptor.h"

namespace poseidon {
namespace {

constexpr std::size_t kMessageBytes = 256u << 10;
constexpr std::size_t kMemoryBytes = 64u << 20;
constexpr std::size_t kStageBytes = 1u << 20;
constexpr std::size_t kWriteBudgetBytes = 2u << 20;
// How many notifications may be outstanding before more is sent. The kernel holds more than this for one socket.
constexpr std::uint64_t kZeroCopyLimit = 64;
constexpr std::size_t kLowWaterBytes = 64u << 10;

enum class Way { blocking, epoll, epoll_zero_copy, uring, uring_buffers };

constexpr unsigned kWriteLowWater = 1;  // TCP_NOTSENT_LOWAT
constexpr unsigned kReadLowWater = 2;   // SO_RCVLOWAT
constexpr unsigned kBothLowWaters = kWriteLowWater | kReadLowWater;
constexpr unsigned kSmallPieces = 8;  // reads of kLowWaterBytes
constexpr unsigned kInPlace = 4;      // data stays in kStageBytes, for a receiver that adds it up at once

struct Case {
  const char* name;
  Way send;
  Way receive;
  unsigned flags = kWriteLowWater;
  int flow_count = 1;
};

constexpr Case kCases[] = {
    {"a blocking", Way::blocking, Way::blocking, 0},
    {"a blocking, NOTSENT_LOWAT", Way::blocking, Way::blocking},
    {"b epoll", Way::epoll, Way::epoll},
    {"b epoll, RCVLOWAT", Way::epoll, Way::epoll, kBothLowWaters},
    {"b epoll, 64 KiB, RCVLOWAT", Way::epoll, Way::epoll, kBothLowWaters | kSmallPieces},
    {"b epoll, 64 KiB, RCVLOWAT, in place", Way::epoll, Way::epoll, kBothLowWaters | kSmallPieces | kInPlace},
    {"c io_uring", Way::uring, Way::uring},
    {"c io_uring, RCVLOWAT", Way::uring, Way::uring, kBothLowWaters},
    {"c io_uring, multishot", Way::uring, Way::uring_buffers},
    {"c io_uring, multishot, RCVLOWAT", Way::uring, Way::uring_buffers, kBothLowWaters},
    {"c epoll, multishot, RCVLOWAT", Way::epoll, Way::uring_buffers, kBothLowWaters},
    {"c epoll, multishot, RCVLOWAT, in place", Way::epoll, Way::uring_buffers, kBothLowWaters | kInPlace},
    {"d MSG_ZEROCOPY, epoll, RCVLOWAT", Way::epoll_zero_copy, Way::epoll, kBothLowWaters},
    {"e epoll, RCVLOWAT, 4 flows", Way::epoll, Way::epoll, kBothLowWaters, 4},
    {"e epoll, RCVLOWAT, 8 flows", Way::epoll, Way::epoll, kBothLowWaters, 8},
    {"e io_uring, 4 flows", Way::uring, Way::uring, kWriteLowWater, 4},
    {"e io_uring, 8 flows", Way::uring, Way::uring, kWriteLowWater, 8},
};

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "socket_bench: %s failed (errno: %s)\n", what, errno_text(errno).c_str());
  std::exit(1);
}

void set_option(int fd, int level, int name, int value) {
  check(::setsockopt(fd, level, name, &value, sizeof(value)) == 0, "setsockopt");
}

/// One end of a flow: its socket, the part of the memory that it uses, and its position.
struct Lane {
  FileDescriptor socket;
  std::span<std::byte> memory;
  std::size_t left_bytes = 0;
  std::size_t position_bytes = 0;  // the position in `memory`
  std::size_t low_water_bytes = 1;
  std::size_t piece_bytes = kMessageBytes;
  std::uint64_t pending_count = 0;  // zero-copy sends whose memory the kernel may still read
  std::uint64_t done_count = 0;     // zero-copy sends that the kernel has finished
  std::uint64_t copied_count = 0;   // how many of those the kernel copied after all

  /// Returns the rest of the current message, or its next piece.
  std::span<std::byte> next(std::size_t limit_bytes = kMessageBytes) const {
    return memory.subspan(position_bytes,
                          std::min({limit_bytes, piece_bytes, kMessageBytes - position_bytes % kMessageBytes}));
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

/// Sends or receives budget_bytes, or as much as the socket takes or gives at once.
void move_some(Lane& lane, bool sends, int flags, std::size_t budget_bytes) {
  budget_bytes = std::min(budget_bytes, lane.left_bytes);
  while (budget_bytes > 0) {
    const auto piece = lane.next(budget_bytes);
    const ssize_t moved = sends ? ::send(lane.socket.get(), piece.data(), piece.size(), flags | MSG_NOSIGNAL)
                                : ::recv(lane.socket.get(), piece.data(), piece.size(), flags);
    if (moved < 0 && (errno == EAGAIN || errno == ENOBUFS)) return;  // ENOBUFS: too many notifications
    check(moved > 0, sends ? "send" : "recv");
    const auto moved_bytes = static_cast<std::size_t>(moved);
    lane.advance(moved_bytes);
    budget_bytes -= moved_bytes;
    if ((flags & MSG_ZEROCOPY) != 0) ++lane.pending_count;
    if ((flags & MSG_DONTWAIT) != 0 && moved_bytes < piece.size()) return;  // the next try would return EAGAIN
  }
}

/// Level-triggered epoll over all lanes. The data of an event is the lane's index.
class Watch {
 public:
  Watch(Lanes lanes, std::uint32_t events) {
    for (std::size_t i = 0; i < lanes.size(); ++i) set(EPOLL_CTL_ADD, lanes[i], i, events);
  }
  void set(int operation, const Lane& lane, std::size_t index, std::uint32_t events) {
    epoll_event event{.events = events, .data = {.u64 = index}};
    check(::epoll_ctl(epoll_.get(), operation, lane.socket.get(), &event) == 0, "epoll_ctl");
  }
  std::span<const epoll_event> wait() {
    const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), -1);
    check(count > 0, "epoll_wait");
    return std::span(events_).first(static_cast<std::size_t>(count));
  }

 private:
  FileDescriptor epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  std::array<epoll_event, 64> events_{};
};

void read_notifications(Lane& lane) {
  for (;;) {
    std::array<std::byte, 256> control{};
    msghdr message{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(lane.socket.get(), &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
      return check(errno == EAGAIN, "recvmsg");
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
      move_some(lane, true, MSG_DONTWAIT | (zero_copy ? MSG_ZEROCOPY : 0), kWriteBudgetBytes);
      const bool full = lane.pending_count >= kZeroCopyLimit || lane.left_bytes == 0;
      // EPOLLERR comes in any case.
      if (notified || full) watch.set(EPOLL_CTL_MOD, lane, event.data.u64, full ? 0u : EPOLLOUT);
    }
  }
}

/// Wakes the receiver for a large part of the message, or for its end.
void update_low_water(Lane& lane) {
  const std::size_t wanted_bytes = lane.next(kLowWaterBytes).size();
  if (wanted_bytes == std::exchange(lane.low_water_bytes, wanted_bytes)) return;
  set_option(lane.socket.get(), SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(wanted_bytes));
}

void receive_epoll(Lanes lanes, bool low_water) {
  Watch watch(lanes, EPOLLIN);
  while (any_unfinished(lanes)) {
    for (const epoll_event& event : watch.wait()) {
      Lane& lane = lanes[event.data.u64];
      move_some(lane, false, MSG_DONTWAIT, kMessageBytes);
      if (lane.left_bytes == 0) watch.set(EPOLL_CTL_MOD, lane, event.data.u64, 0);
      if (low_water) update_low_water(lane);
    }
  }
}

#ifdef POSEIDON_HAVE_LIBURING
constexpr unsigned kRingEntries = 64;
constexpr unsigned kRingFlags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
constexpr unsigned kBufferCount = 16;
constexpr std::size_t kBufferBytes = 64u << 10;

/// An io_uring that one thread owns.
class Ring {
 public:
  Ring() : error_(-::io_uring_queue_init(kRingEntries, &ring_, kRingFlags)) {}
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
  /// Submits what was requested, waits for at least one completion, and handles all completions that are there.
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

/// Each lane has one request at a time. With a low-water mark it may not wait for all bytes: it would wait forever.
void move_uring(Lanes lanes, bool sends, bool low_water) {
  Ring ring;
  const auto start = [&](std::size_t i) {
    if (low_water) update_low_water(lanes[i]);
    const int fd = lanes[i].socket.get();
    const auto piece = lanes[i].next();
    io_uring_sqe* entry = ring.request();
    if (sends) {
      ::io_uring_prep_send(entry, fd, piece.data(), piece.size(), MSG_NOSIGNAL | MSG_WAITALL);
    } else {
      ::io_uring_prep_recv(entry, fd, piece.data(), piece.size(), low_water ? 0 : MSG_WAITALL);
    }
    ::io_uring_sqe_set_data64(entry, i);
  };
  for (std::size_t i = 0; i < lanes.size(); ++i) start(i);
  while (any_unfinished(lanes)) {
    ring.turn([&](const io_uring_cqe& done) {
      Lane& lane = lanes[done.user_data];
      errno = -done.res;
      check(done.res > 0, "io_uring send or recv");
      lane.advance(static_cast<std::size_t>(done.res));
      if (lane.left_bytes > 0) start(done.user_data);
    });
  }
}

/// The kernel chooses the buffers. Unless in_place is set, the data is copied from there.
void receive_uring_buffers(Lanes lanes, bool in_place, bool low_water) {
  std::vector<std::byte> buffers(kBufferBytes * kBufferCount, std::byte{1});
  alignas(4096) std::array<std::byte, 4096> ring_memory{};
  Ring ring;  // the ring is destroyed before the memory that the kernel writes to
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
        if (low_water) update_low_water(lane);
      }
      if ((done.flags & IORING_CQE_F_MORE) == 0 && lane.left_bytes > 0) start(done.user_data);
    });
  }
}
#endif

void move(const Case& which, bool sends, Lanes lanes) {
  const Way way = sends ? which.send : which.receive;
  const bool low_water = !sends && (which.flags & kReadLowWater) != 0;
  if (way == Way::blocking) return move_some(lanes[0], sends, 0, lanes[0].left_bytes);
#ifdef POSEIDON_HAVE_LIBURING
  if (way == Way::uring_buffers) return receive_uring_buffers(lanes, (which.flags & kInPlace) != 0, low_water);
  if (way == Way::uring) return move_uring(lanes, sends, low_water);
#endif
  sends ? send_epoll(lanes, way == Way::epoll_zero_copy) : receive_epoll(lanes, low_water);
}

struct Setup {
  std::size_t round_bytes = 0;
  int round_count = 0;
  std::string_view wanted;
  const char* address = nullptr;
  std::array<const char*, 2> namespaces{};  // the receiver's and the sender's; null: the current one
};

void enter_namespace(const char* name) {
  if (name == nullptr) return;
  const FileDescriptor file(::open((std::string("/run/netns/") + name).c_str(), O_RDONLY | O_CLOEXEC));
  check(::setns(file.get(), CLONE_NEWNET) == 0, "setns");
}

FileDescriptor new_socket() { return FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

/// Returns the sockets of one side. The receiver listens and tells the sender its port.
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
    const int fd = lane.socket.get();
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if ((which.flags & kWriteLowWater) != 0) set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kLowWaterBytes);
  }
  return lanes;
}

using Memories = std::array<std::vector<std::byte>, 2>;  // the receiver's and the sender's

struct Sample {
  double mb_per_s = 0;
  double cpu_s_per_gb = 0;
  std::uint64_t copied_percent = 0;  // the percentage of the zero-copy sends that the kernel copied
};

/// Returns the CPU time of both sides, user and system.
double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  timeval total{};
  timeradd(&usage.ru_utime, &usage.ru_stime, &total);
  return static_cast<double>(total.tv_sec) + static_cast<double>(total.tv_usec) / 1e6;
}

Sample measure(const Setup& setup, const Case& which, Memories& memories) {
  std::promise<in_port_t> port;
  Sample sample;
  double cpu_s = 0;
  std::chrono::duration<double> elapsed{};
  // The two sides meet when they are connected and when they are done. The difference is measured.
  std::barrier both(2, [&]() noexcept {
    cpu_s = cpu_seconds() - cpu_s;
    elapsed = std::chrono::steady_clock::now().time_since_epoch() - elapsed;
  });
  const auto run_side = [&](bool sends) {
    enter_namespace(setup.namespaces[sends ? 1 : 0]);
    std::vector<Lane> lanes = connected_lanes(setup, which, sends, port);
    const bool in_place = !sends && (which.flags & kInPlace) != 0;
    const std::size_t share_bytes = (in_place ? kStageBytes : kMemoryBytes) / lanes.size();
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i].memory = std::span(memories[sends ? 1 : 0]).subspan(i * share_bytes, share_bytes);
      if (!sends && (which.flags & kSmallPieces) != 0) lanes[i].piece_bytes = kLowWaterBytes;
      lanes[i].left_bytes = setup.round_bytes / lanes.size();
    }
    both.arrive_and_wait();
    move(which, sends, lanes);
    both.arrive_and_wait();
    if (lanes[0].done_count > 0) sample.copied_percent = 100 * lanes[0].copied_count / lanes[0].done_count;
  };
  std::thread receiver(run_side, false);
  std::thread sender(run_side, true);
  receiver.join();
  sender.join();
  const auto bytes = static_cast<double>(setup.round_bytes);
  sample.mb_per_s = bytes / elapsed.count() / 1e6;
  sample.cpu_s_per_gb = cpu_s / (bytes / 1e9);
  return sample;
}

void print_row(const char* name, const std::vector<Sample>& samples, const std::vector<Sample>& bases) {
  const auto median = [&](double Sample::*field, bool ratio) {
    std::vector<double> values(samples.size());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = samples[i].*field / (ratio ? bases[i].*field : 1);
    std::ranges::sort(values);
    return values[values.size() / 2];
  };
  std::printf("%-39s %7.0f %6.2f %9.3f %6.2f", name, median(&Sample::mb_per_s, false), median(&Sample::mb_per_s, true),
              median(&Sample::cpu_s_per_gb, false), median(&Sample::cpu_s_per_gb, true));
  const auto copied_percent = static_cast<unsigned>(samples.back().copied_percent);
  std::printf(copied_percent > 0 ? "  (%u %% copied)\n" : "\n", copied_percent);
}

std::vector<const Case*> chosen_cases(const Setup& setup) {
#ifdef POSEIDON_HAVE_LIBURING
  const int uring_error = Ring().error();
  if (uring_error != 0) std::printf("io_uring is not available: %s\n", errno_text(uring_error).c_str());
#else
  const int uring_error = ENOSYS;
  std::puts("built without liburing: io_uring is not measured");
#endif
  std::vector<const Case*> chosen;
  for (const Case& which : kCases) {
    const bool possible = uring_error == 0 || (which.send < Way::uring && which.receive < Way::uring);
    const bool wanted = chosen.empty() || std::string_view(which.name).find(setup.wanted) != std::string_view::npos;
    if (possible && wanted) chosen.push_back(&which);
  }
  return chosen;
}

int run(int argument_count, char** arguments) {
  const auto argument = [&](int i, const char* otherwise) { return argument_count > i ? arguments[i] : otherwise; };
  Setup setup;
  setup.round_bytes = std::strtoull(argument(1, "512"), nullptr, 10) << 20;
  setup.round_count = std::atoi(argument(2, "5"));
  setup.wanted = argument(3, "");
  setup.address = argument(4, "127.0.0.1");
  setup.namespaces = {argument(5, nullptr), argument(6, nullptr)};
  check(setup.round_bytes > 0 && setup.round_bytes % kMemoryBytes == 0 && setup.round_count > 0, "arguments");
  const std::vector<const Case*> cases = chosen_cases(setup);
  Memories memories;
  memories.fill(std::vector<std::byte>(kMemoryBytes));
  for (std::size_t i = 0; i < kMemoryBytes; ++i) memories[1][i] = static_cast<std::byte>(i * 2654435761u >> 24);
  std::vector<std::vector<Sample>> samples(cases.size());
  for (int round = 0; round < setup.round_count; ++round) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      std::ranges::fill(memories[0], std::byte{1});
      samples[i].push_back(measure(setup, *cases[i], memories));
      check((cases[i]->flags & kInPlace) != 0 || memories[0] == memories[1], "comparison of what arrived");
    }
  }
  std::printf("%-39s %7s %6s %9s %6s\n", "", "MB/s", "ratio", "CPU s/GB", "ratio");
  for (std::size_t i = 0; i < cases.size(); ++i) print_row(cases[i]->name, samples[i], samples[0]);
  return 0;
}

}  // namespace
}  // namespace poseidon

int main(int argument_count, char** arguments) { return poseidon::run(argument_count, arguments); }
