// What the TCP transport reaches over loopback, against two threads that copy the same bytes through
// a plain blocking socket. Prints rate and CPU time of both and their ratios, medians of alternating rounds.
//
// Usage: transport_bench [flow_count] [mib_per_round] [round_count]
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/file_descriptor.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon {
namespace {

constexpr std::size_t kMessageBytes = 2u << 20;
constexpr int kMessagesInFlight = 8;

/// Of all threads, user and system. Says more than the rate where other processes use the cores too.
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

/// Memory that is really there: untouched pages would all be the kernel's one page of zeros.
Buffer filled_buffer(std::size_t size_bytes) {
  Buffer buffer(size_bytes);
  std::memset(buffer.data(), 0x5a, buffer.size());
  return buffer;
}

/// Takes messages into one buffer and says when all are there.
class Sink final : public Receiver {
 public:
  void expect(int message_count) { left_ = message_count; }
  std::promise<void>& all_here() { return all_here_; }

  Result<std::span<std::byte>> on_header(Flow&, const wire::Header&) override { return place_.span(); }
  Status on_message(Flow&, const wire::Header&, std::span<const std::byte>, std::function<void()>) override {
    if (--left_ == 0) all_here_.set_value();
    return {};
  }
  void on_closed(Flow&, const Status&) override { closed_.set_value(); }
  void wait_closed() { closed_.get_future().wait(); }

 private:
  Buffer place_ = filled_buffer(kMessageBytes);
  int left_ = 0;
  std::promise<void> all_here_;
  std::promise<void> closed_;
};

/// Keeps a few messages in flight until all are sent. Loop thread only.
struct Source {
  std::shared_ptr<Flow> flow;
  Buffer payload = filled_buffer(kMessageBytes);
  int left = 0;

  void send_next() {
    if (left == 0) return;
    --left;
    wire::Header header;
    header.kind = wire::Kind::push;
    flow->send(header, {std::as_const(payload).span()}, [this](const Status&) { send_next(); });
  }
};

/// MB/s of `message_count` messages on each of `flow_count` flows between two loops.
Rate transport_rate(int flow_count, int message_count) {
  Loop left("sender");
  Loop right("receiver");
  const auto transport = make_tcp_transport();
  std::vector<std::unique_ptr<Sink>> sinks;
  std::vector<std::unique_ptr<Sink>> source_sinks;
  std::vector<std::unique_ptr<Source>> sources;
  for (int i = 0; i < flow_count; ++i) {
    sinks.push_back(std::make_unique<Sink>());
    sinks.back()->expect(message_count);
    source_sinks.push_back(std::make_unique<Sink>());
    sources.push_back(std::make_unique<Source>());
    std::promise<void> accepted;
    auto listener = transport->listen(right, "127.0.0.1:0", [&](std::shared_ptr<Flow> flow) {
      flow->set_receiver(sinks.back().get());
      accepted.set_value();
    });
    check(listener.ok(), "listen");
    std::promise<void> connected;
    transport->connect(left, listener.value()->address(), Clock::now() + std::chrono::seconds(5),
                       [&](Result<std::shared_ptr<Flow>> flow) {
                         check(flow.ok(), "connect");
                         sources.back()->flow = flow.value();
                         sources.back()->flow->set_receiver(source_sinks.back().get());
                         connected.set_value();
                       });
    connected.get_future().wait();
    accepted.get_future().wait();
  }
  const Stopwatch stopwatch;
  left.post([&] {
    for (auto& source : sources) {
      source->left = message_count;
      for (int i = 0; i < kMessagesInFlight; ++i) source->send_next();
    }
  });
  for (auto& sink : sinks) sink->all_here().get_future().wait();
  const Rate rate =
      stopwatch.rate(kMessageBytes * static_cast<std::size_t>(message_count) * static_cast<std::size_t>(flow_count));
  left.call([&] {
    for (auto& source : sources) source->flow->close(std::chrono::seconds(1));
  });
  for (auto& sink : source_sinks) sink->wait_closed();
  for (auto& sink : sinks) sink->wait_closed();
  left.call([&] { sources.clear(); });
  return rate;
}

/// MB/s of one thread that writes to a blocking socket and one that reads from it, both going round
/// as much memory as the transport's flows touch.
Rate plain_rate(std::size_t total_bytes, std::size_t memory_bytes) {
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
      const std::size_t size_bytes = kMessageBytes - sent % kMessageBytes;
      const ssize_t count = ::send(writer.get(), from.data() + sent % memory_bytes, size_bytes, MSG_NOSIGNAL);
      check(count > 0, "send");
      sent += static_cast<std::size_t>(count);
    }
  });
  for (std::size_t got = 0; got < total_bytes;) {
    const std::size_t size_bytes = kMessageBytes - got % kMessageBytes;
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

int main_with(int flow_count, int mib_per_round, int round_count) {
  const int message_count = std::max(1, mib_per_round / 2 / flow_count);
  const std::size_t total_bytes =
      kMessageBytes * static_cast<std::size_t>(message_count) * static_cast<std::size_t>(flow_count);
  std::vector<Rate> transport;
  std::vector<Rate> plain;
  for (int round = 0; round < round_count; ++round) {
    plain.push_back(plain_rate(total_bytes, kMessageBytes * static_cast<std::size_t>(flow_count)));
    transport.push_back(transport_rate(flow_count, message_count));
  }
  const double rate = median(transport, &Rate::mb_per_s);
  const double plain_mb_per_s = median(plain, &Rate::mb_per_s);
  const double cost = median(transport, &Rate::cpu_s_per_gb);
  const double plain_cost = median(plain, &Rate::cpu_s_per_gb);
  std::printf("flows %d, medians of %d rounds\n", flow_count, round_count);
  std::printf("transport     %6.0f MB/s  %.3f CPU s/GB\n", rate, cost);
  std::printf("plain socket  %6.0f MB/s  %.3f CPU s/GB\n", plain_mb_per_s, plain_cost);
  std::printf("ratio         %.3f         %.3f\n", rate / plain_mb_per_s, cost / plain_cost);
  return 0;
}

}  // namespace
}  // namespace poseidon

int main(int argc, char** argv) {
  const auto argument = [&](int index, int fallback) {
    return argc > index ? std::max(1, std::atoi(argv[index])) : fallback;
  };
  return poseidon::main_with(argument(1, 1), argument(2, 1024), argument(3, 5));
}
