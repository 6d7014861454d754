// Measures the start of a job on one machine: from the first call of the store to the end of the first step, and the
// operations that the store serves for it. Then it counts the sockets of each process and its memory. Each rank is a
// process with a client and a server, and they talk over loopback. Usage: start_bench RANKS [CLASSES [PORT]]. The exit
// status is 1 if the start takes longer than 5 seconds.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "core/small_job.h"
#include "poseidon/client.h"
#include "poseidon/store.h"

namespace poseidon::bench {
namespace {

constexpr std::size_t kLayers = 20;
constexpr std::size_t kElements = 1000;
constexpr double kBarSeconds = 5;

/// A store that counts its operations.
class CountingStore final : public Store {
 public:
  CountingStore(std::shared_ptr<Store> store, std::size_t& count) : store_(std::move(store)), count_(count) {}
  Status set(const std::string& key, const std::string& value) override {
    ++count_;
    return store_->set(key, value);
  }
  Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    ++count_;
    return store_->get(key, timeout);
  }

 private:
  const std::shared_ptr<Store> store_;
  std::size_t& count_;
};

std::unique_ptr<Client> start(const Options& options, std::size_t& operations) {
  auto store = open_store(options, always);
  if (!store.ok()) give_up(store.status());
  auto client = Client::connect(options, std::make_shared<CountingStore>(store.value(), operations), always);
  if (!client.ok()) give_up(client.status());
  take_first_step(*client.value(), kLayers, kElements);
  return std::move(client.value());
}

/// What a rank tells the parent.
struct Report {
  double start_seconds = 0;
  std::size_t operations = 0;
  std::size_t sockets = 0;
  double resident_mb = 0;  // of which what the process had before it started is not counted
};

double since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

/// Runs in a process of its own: starts when the parent closes its pipe, reports, and ends as any job does.
void take_part(const Options& options, int start_pipe, int result_pipe) {
  char nothing = 0;
  Report report;
  if (::read(start_pipe, &nothing, 1) != 0) std::exit(1);
  const double before_mb = resident_mb();
  const auto begun = std::chrono::steady_clock::now();
  auto client = start(options, report.operations);
  report.start_seconds = since(begun);
  report.sockets = open_sockets().count;
  report.resident_mb = resident_mb() - before_mb;
  if (::write(result_pipe, &report, sizeof(report)) != sizeof(report)) std::exit(1);
}

bool run(int ranks, int classes, int port) {
  std::array<int, 2> go{};
  std::array<int, 2> results{};
  if (::pipe(go.data()) != 0 || ::pipe(results.data()) != 0) std::exit(1);
  for (int rank = 0; rank < ranks; ++rank) {
    if (::fork() != 0) continue;
    ::close(go[1]);
    Options options;
    options.rank = rank;
    options.world_size = ranks;
    options.master_addr = "127.0.0.1";
    options.master_port = port;
    options.transport = Medium::tcp;
    options.priority_classes = classes;
    options.dscp.resize(static_cast<std::size_t>(classes), 0);
    take_part(options, go[0], results[1]);
    ::_exit(0);
  }
  ::close(results[1]);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until all wait
  const auto begun = std::chrono::steady_clock::now();
  ::close(go[1]);
  double slowest = 0;
  double operations = 0;
  std::size_t sockets = 0;
  double most_mb = 0;
  Report report;
  int count = 0;
  for (; ::read(results[0], &report, sizeof(report)) == sizeof(report); ++count) {
    slowest = std::max(slowest, report.start_seconds);
    operations += static_cast<double>(report.operations);
    sockets = std::max(sockets, report.sockets);
    most_mb = std::max(most_mb, report.resident_mb);
  }
  const double ended = since(begun) - slowest;
  while (::wait(nullptr) > 0) {
  }
  if (count != ranks) std::exit(1);
  const bool met = slowest <= kBarSeconds;
  std::printf(
      "%d ranks: first step after %.2f s (bar %.0f: %s), ended %.2f s later; store operations: %.0f, %.2f P log2 P\n",
      ranks, slowest, kBarSeconds, met ? "met" : "missed", ended, operations,
      operations / (ranks * std::max(1.0, std::log2(ranks))));
  std::printf("most sockets of a process: %zu; memory that the job took of a process: up to %.1f MB\n", sockets,
              most_mb);
  return met;
}

}  // namespace
}  // namespace poseidon::bench

int main(int argument_count, char** arguments) {
  if (argument_count < 2) {
    std::fprintf(stderr, "usage: start_bench RANKS [CLASSES [PORT]]\n");
    return 2;
  }
  const int classes = argument_count > 2 ? std::atoi(arguments[2]) : poseidon::Options().priority_classes;
  return poseidon::bench::run(std::atoi(arguments[1]), classes, argument_count > 3 ? std::atoi(arguments[3]) : 29'641)
             ? 0
             : 1;
}
