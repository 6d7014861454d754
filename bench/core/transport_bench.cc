// Measures a transport between two loops of this machine and compares it with a plain way. For TCP the plain way is two
// threads that copy the same bytes through a blocking socket. For TLS it is the transport without TLS, and for shared
// memory one thread's memcpy. All of them cycle through the same memory. It prints the rate and CPU time of both and
// their ratios, as medians of alternating rounds.
//
// Usage: transport_bench [flow_count] [mib_per_round] [round_count] [tcp|tls|shm] [message_kib] [memory_mib]
// [way_count]. memory_mib is the memory of each flow at each end (0: one message). With way_count 2 both ends send at
// once.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/file_descriptor.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tls/tls_session.h"
#include "wire/handshake.h"
#include "wire/messages/contribution.h"

namespace poseidon {
namespace {

constexpr int kMessagesInFlight = 8;

struct Setup {
  int flow_count = 1;
  int round_count = 5;
  bool shared_memory = false;
  bool tls = false;
  std::size_t message_bytes = 0;
  std::size_t memory_bytes = 0;  // the memory that a flow cycles through; a multiple of message_bytes
  int way_count = 1;
  int message_count = 1;  // per flow, direction and round

  std::size_t total_bytes() const {
    return message_bytes * static_cast<std::size_t>(message_count) * static_cast<std::size_t>(flow_count * way_count);
  }
};

/// Returns the CPU time of all threads, user and system. It tells more than the rate if other processes use the cores,
/// too.
double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// How fast a round was and what it cost.
struct Rate {
  double mb_per_s = 0;
  double cpu_s_per_gb = 0;
};

class Stopwatch {
 public:
  Rate rate(std::size_t total_bytes) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    const double bytes = static_cast<double>(total_bytes);
    return {bytes / seconds / 1e6, (cpu_seconds() - start_cpu_) / (bytes / 1e9)};
  }

 private:
  const Clock::time_point start_ = Clock::now();
  const double start_cpu_ = cpu_seconds();
};

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "transport_bench: %s failed\n", what);
  std::exit(1);
}

/// Returns memory that really exists. Pages that nobody has written would all be the kernel's one page of zeros.
Buffer filled_buffer(std::size_t size_bytes) {
  Buffer buffer(size_bytes);
  std::memset(buffer.data(), 0x5a, buffer.size());
  return buffer;
}

/// Memory for messages, one after the other.
class Memory {
 public:
  explicit Memory(const Setup& setup)
      : message_bytes_(setup.message_bytes), buffer_(filled_buffer(setup.memory_bytes)) {}

  std::span<std::byte> next() {
    const auto place = buffer_.span().subspan(at_bytes_, message_bytes_);
    at_bytes_ = (at_bytes_ + message_bytes_) % buffer_.size();
    return place;
  }

 private:
  const std::size_t message_bytes_;
  Buffer buffer_;
  std::size_t at_bytes_ = 0;
};

/// One end of a flow. It takes messages to its memory and reports when all have come. It keeps a few messages of its
/// own in flight until all are sent.
class End final : public Receiver {
 public:
  explicit End(const Setup& setup) : to_(setup), from_(setup), left_(setup.message_count) {}

  void open(std::shared_ptr<Flow> flow) {
    flow_ = std::move(flow);
    flow_->set_receiver(this);
    opened_.set_value();
  }
  void send_all(int count) {
    to_send_ = count;
    for (int i = 0; i < kMessagesInFlight; ++i) send_next();
  }
  void close() { flow_->close(std::chrono::seconds(1)); }
  void wait_opened() { opened_.get_future().wait(); }
  void wait_all_here() { all_here_.get_future().wait(); }
  void wait_closed() { closed_.get_future().wait(); }

  Result<std::span<std::byte>> accept(Flow&, const wire::Header&, bool /*lent*/) override { return to_.next(); }
  Status on_message(Flow&, const wire::Header&, std::span<const std::byte> payload,
                    std::function<void()> release) override {
    if (release) std::memcpy(to_.next().data(), payload.data(), payload.size());
    if (--left_ == 0) all_here_.set_value();
    return {};
  }
  void on_closed(Flow&, const Status&) override {
    flow_.reset();
    closed_.set_value();
  }

 private:
  void send_next() {
    if (to_send_ == 0) return;
    --to_send_;
    flow_->send(wire::Contribution().make(), {from_.next()}, [this](const Status&) { send_next(); });
  }

  Memory to_;
  Memory from_;
  std::shared_ptr<Flow> flow_;
  int left_;
  int to_send_ = 0;
  std::promise<void> opened_;
  std::promise<void> all_here_;
  std::promise<void> closed_;
};

std::unique_ptr<Transport> make_transport(const Setup& setup) {
  if (setup.shared_memory) return make_shm_transport();
  Admission admission;
  if (setup.tls) {
    auto context = make_tls_context();
    check(context.ok(), context.status().message().c_str());
    admission.credentials = wire::Credentials::from_text("the secret of this benchmark").value();
    admission.tls = std::move(context.value());
  }
  return make_tcp_transport(admission);
}

/// Measures all messages of all flows between two loops.
Rate transport_rate(const Setup& setup) {
  Loop left("sender");
  Loop right("receiver");
  const auto transport = make_transport(setup);
  std::vector<std::unique_ptr<End>> lefts;
  std::vector<std::unique_ptr<End>> rights;
  for (int i = 0; i < setup.flow_count; ++i) {
    lefts.push_back(std::make_unique<End>(setup));
    rights.push_back(std::make_unique<End>(setup));
    auto listener = transport->listen(right, setup.shared_memory ? "bench:0" : "127.0.0.1:0",
                                      [&](std::shared_ptr<Flow> flow) { rights.back()->open(std::move(flow)); });
    check(listener.ok(), "listen");
    transport->connect(left, listener.value()->address(), Clock::now() + std::chrono::seconds(5),
                       [&](Result<std::shared_ptr<Flow>> flow) {
                         check(flow.ok(), "connect");
                         lefts.back()->open(std::move(flow.value()));
                       });
    lefts.back()->wait_opened();
    rights.back()->wait_opened();
  }
  const Stopwatch stopwatch;
  const auto send_all = [&](const std::vector<std::unique_ptr<End>>& ends) {
    for (auto& end : ends) end->send_all(setup.message_count);
  };
  left.post([&] { send_all(lefts); });
  if (setup.way_count == 2) right.post([&] { send_all(rights); });
  for (auto& end : rights) end->wait_all_here();
  if (setup.way_count == 2) {
    for (auto& end : lefts) end->wait_all_here();
  }
  const Rate rate = stopwatch.rate(setup.total_bytes());
  left.call([&] {
    for (auto& end : lefts) end->close();
  });
  for (auto& end : lefts) end->wait_closed();
  for (auto& end : rights) end->wait_closed();
  return rate;
}

/// Measures one thread that copies the same bytes once.
Rate copy_rate(const Setup& setup) {
  Setup all = setup;
  all.memory_bytes *= static_cast<std::size_t>(setup.flow_count);
  Memory from(all);
  Memory to(all);
  const Stopwatch stopwatch;
  for (std::size_t copied = 0; copied < setup.total_bytes(); copied += setup.message_bytes) {
    std::memcpy(to.next().data(), from.next().data(), setup.message_bytes);
  }
  return stopwatch.rate(setup.total_bytes());
}

/// Measures one thread that writes to a blocking socket and one that reads from it.
Rate socket_rate(const Setup& setup) {
  const std::size_t total_bytes = setup.total_bytes();
  const std::size_t memory_bytes = setup.memory_bytes * static_cast<std::size_t>(setup.flow_count);
  const auto any = tcp::resolve("127.0.0.1:0");
  check(any.ok(), "resolve");
  const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const FileDescriptor writer(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto& loopback = any.value()[0];
  check(::bind(listener.get(), loopback.get(), loopback.size_bytes) == 0 && ::listen(listener.get(), 1) == 0, "listen");
  const auto where = tcp::local_address(listener.get());
  check(::connect(writer.get(), where.get(), where.size_bytes) == 0, "connect");
  const FileDescriptor reader(::accept(listener.get(), nullptr, nullptr));
  check(static_cast<bool>(reader), "accept");

  const Buffer from = filled_buffer(memory_bytes);
  Buffer to = filled_buffer(memory_bytes);
  const Stopwatch stopwatch;
  std::thread sending([&] {
    for (std::size_t sent = 0; sent < total_bytes;) {
      const std::size_t size_bytes = setup.message_bytes - sent % setup.message_bytes;
      const ssize_t count = ::send(writer.get(), from.data() + sent % memory_bytes, size_bytes, MSG_NOSIGNAL);
      check(count > 0, "send");
      sent += static_cast<std::size_t>(count);
    }
  });
  for (std::size_t got = 0; got < total_bytes;) {
    const std::size_t size_bytes = setup.message_bytes - got % setup.message_bytes;
    const ssize_t count = ::recv(reader.get(), to.data() + got % memory_bytes, size_bytes, 0);
    check(count > 0, "recv");
    got += static_cast<std::size_t>(count);
  }
  sending.join();
  return stopwatch.rate(total_bytes);
}

double median(const std::vector<Rate>& rates, double Rate::*field) {
  std::vector<double> values;
  for (const Rate& rate : rates) values.push_back(rate.*field);
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Measures what the transport is compared with.
Rate plain_rate(const Setup& setup) {
  if (setup.shared_memory) return copy_rate(setup);
  if (!setup.tls) return socket_rate(setup);
  Setup without = setup;
  without.tls = false;
  return transport_rate(without);
}

int main_with(const Setup& setup) {
  std::vector<Rate> transport;
  std::vector<Rate> plain;
  for (int round = 0; round < setup.round_count; ++round) {
    plain.push_back(plain_rate(setup));
    transport.push_back(transport_rate(setup));
  }
  const double rate = median(transport, &Rate::mb_per_s);
  const double plain_mb_per_s = median(plain, &Rate::mb_per_s);
  const double cost = median(transport, &Rate::cpu_s_per_gb);
  const double plain_cost = median(plain, &Rate::cpu_s_per_gb);
  std::printf("flows %d, messages of %zu KiB, ways %d, medians of %d rounds\n", setup.flow_count,
              setup.message_bytes >> 10, setup.way_count, setup.round_count);
  std::printf("transport     %6.0f MB/s  %.3f CPU s/GB\n", rate, cost);
  const char* const plain_name = setup.shared_memory ? "memcpy" : setup.tls ? "without TLS" : "plain socket";
  std::printf("%-13s %6.0f MB/s  %.3f CPU s/GB\n", plain_name, plain_mb_per_s, plain_cost);
  std::printf("ratio         %.3f         %.3f\n", rate / plain_mb_per_s, cost / plain_cost);
  return 0;
}

}  // namespace
}  // namespace poseidon

int main(int argc, char** argv) {
  const auto argument = [&](int index, int fallback, int least) {
    return argc > index ? std::max(least, std::atoi(argv[index])) : fallback;
  };
  poseidon::Setup setup;
  setup.flow_count = argument(1, 1, 1);
  setup.round_count = argument(3, 5, 1);
  setup.shared_memory = argc > 4 && std::string(argv[4]) == "shm";
  setup.tls = argc > 4 && std::string(argv[4]) == "tls";
  setup.message_bytes = static_cast<std::size_t>(argument(5, 2048, 1)) << 10;
  const std::size_t wanted_bytes = static_cast<std::size_t>(argument(6, 0, 0)) << 20;
  setup.memory_bytes = std::max<std::size_t>(1, wanted_bytes / setup.message_bytes) * setup.message_bytes;
  setup.way_count = std::min(2, argument(7, 1, 1));
  const std::size_t round_bytes = static_cast<std::size_t>(argument(2, 1024, 1)) << 20;
  const auto ends = static_cast<std::size_t>(setup.flow_count * setup.way_count);
  setup.message_count = static_cast<int>(std::max<std::size_t>(1, round_bytes / setup.message_bytes / ends));
  return poseidon::main_with(setup);
}
