// Measures one worker's process in a job of many: its sockets, its memory and the kernel's memory for its sockets. The
// other workers share another process. They are workers like this one, and connect to each other inside their process
// and to this one over loopback. The model has a chunk on each worker's server, so that all are connected. Usage:
// crowd_bench [WORKERS]. The exit status is 1 if the process misses a bar.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/small_job.h"
#include "plan/mesh.h"
#include "poseidon/store.h"
#include "transport/inproc/inproc_transport.h"
#include "worker/join.h"

namespace poseidon::bench {
namespace {

constexpr std::size_t kElements = 16;
constexpr std::size_t kSocketBar = 2100;
constexpr double kMemoryBarMb = 200;
constexpr auto kTimeout = std::chrono::hours(2);  // 1,024 workers connect to each other a million times

/// Where the crowd's members find each other.
struct Registry {
  std::unique_ptr<Transport> inside = make_inproc_transport();
  std::mutex mutex;
  std::map<std::string, std::string> inside_addresses;  // by address on loopback; guarded by mutex
};

class TwoListeners final : public Listener {
 public:
  TwoListeners(std::unique_ptr<Listener> network, std::unique_ptr<Listener> inside)
      : network_(std::move(network)), inside_(std::move(inside)) {}
  const std::string& address() const override { return network_->address(); }

 private:
  const std::unique_ptr<Listener> network_;
  const std::unique_ptr<Listener> inside_;
};

/// Listens on loopback and inside the process, and connects inside the process where it can.
class CrowdTransport final : public Transport {
 public:
  CrowdTransport(std::unique_ptr<Transport> network, Registry& registry)
      : network_(std::move(network)), registry_(registry) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           std::function<void(std::shared_ptr<Flow>)> on_accept) override {
    auto network = network_->listen(loop, address, on_accept);
    if (!network.ok()) return network;
    auto inside = registry_.inside->listen(loop, "crowd:0", std::move(on_accept));
    if (!inside.ok()) return inside;
    const std::lock_guard lock(registry_.mutex);
    registry_.inside_addresses[network.value()->address()] = inside.value()->address();
    return Result<std::unique_ptr<Listener>>(
        std::make_unique<TwoListeners>(std::move(network.value()), std::move(inside.value())));
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
               std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
    std::unique_lock lock(registry_.mutex);
    const auto found = registry_.inside_addresses.find(address);
    if (found == registry_.inside_addresses.end()) {
      lock.unlock();
      return network_->connect(loop, address, deadline, std::move(done));
    }
    const std::string inside = found->second;
    lock.unlock();
    registry_.inside->connect(loop, inside, deadline, std::move(done));
  }

 private:
  const std::unique_ptr<Transport> network_;
  Registry& registry_;
};

Options options_of(int rank, int workers) {
  Options options;
  options.rank = rank;
  options.world_size = workers;
  options.master_addr = "127.0.0.1";
  options.master_port = 29'642;
  options.timeout = kTimeout;
  options.transport = Medium::tcp;
  options.priority_classes = static_cast<std::size_t>(workers) > kFullMesh ? 1 : 2;  // Python's default
  options.dscp.resize(static_cast<std::size_t>(options.priority_classes), 0);
  options.small_bytes = 0;  // each layer has its own chunk
  return options;
}

struct Report {
  OpenSockets sockets;
  double resident_mb = 0;
};

/// The measured process. It ends when the pipe that it waits for is closed.
void be_alone(int workers, int done_pipe, int result_pipe) {
  const double before_mb = resident_mb();
  auto client = Client::connect(options_of(0, workers), nullptr, always);
  if (!client.ok()) give_up(client.status());
  take_first_step(*client.value(), static_cast<std::size_t>(workers), kElements);
  const Report report{open_sockets(), resident_mb() - before_mb};
  char nothing = 0;
  if (::write(result_pipe, &report, sizeof report) != sizeof report || ::read(done_pipe, &nothing, 1) != 0)
    std::exit(1);
}

std::unique_ptr<Client> join_crowd(Registry& registry, int rank, int workers) {
  const Options options = options_of(rank, workers);
  auto transports = make_transports(options);
  if (!transports.ok()) give_up(transports.status());
  auto& network = transports.value().networks.front();
  network = std::make_unique<CrowdTransport>(std::move(network), registry);
  auto store = open_store(options, always);
  if (!store.ok()) give_up(store.status());
  auto client = join_job(options, std::move(store.value()), always, std::move(transports.value()));
  if (!client.ok()) give_up(client.status());
  take_first_step(*client.value(), static_cast<std::size_t>(workers), kElements);
  return std::move(client.value());
}

bool judge(int workers, const Report& report) {
  const bool few = report.sockets.count <= kSocketBar;
  const bool small = report.resident_mb <= kMemoryBarMb;
  std::printf("one of %d workers: %zu sockets (bar %zu: %s), %.1f MB (bar %.0f: %s), and %.1f MB of the kernel's\n",
              workers, report.sockets.count, kSocketBar, few ? "met" : "missed", report.resident_mb, kMemoryBarMb,
              small ? "met" : "missed", report.sockets.kernel_mb);
  return few && small;
}

bool run(int workers) {
  std::array<int, 2> done{};
  std::array<int, 2> results{};
  if (::pipe(done.data()) != 0 || ::pipe(results.data()) != 0) std::exit(1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(done[1]);
    be_alone(workers, done[0], results[1]);
    std::exit(0);
  }
  ::close(results[1]);
  Registry registry;
  std::vector<std::unique_ptr<Client>> crowd(static_cast<std::size_t>(workers));
  const auto each = [&crowd, workers](const auto& body) {
    std::vector<std::thread> threads;
    for (int rank = 1; rank < workers; ++rank)
      threads.emplace_back([&body, &crowd, rank] { body(crowd[static_cast<std::size_t>(rank)], rank); });
    for (auto& thread : threads) thread.join();
  };
  each([&](auto& client, int rank) { client = join_crowd(registry, rank, workers); });
  Report report;
  if (::read(results[0], &report, sizeof report) != sizeof report) return false;
  const bool met = judge(workers, report);
  std::fflush(stdout);
  ::close(done[1]);
  each([](auto& client, int) { client.reset(); });
  ::waitpid(child, nullptr, 0);
  return met;
}

}  // namespace
}  // namespace poseidon::bench

int main(int argument_count, char** arguments) {
  return poseidon::bench::run(argument_count > 1 ? std::atoi(arguments[1]) : 1024) ? 0 : 1;
}
