// Servers that withstand a broken worker: a program registers an aggregator, here a trimmed mean, and names it in a
// rule. Usage: aggregator [PORT], the port at which the workers find each other. They are threads of one process here.
#include <poseidon/aggregate.h>
#include <poseidon/client.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kWorkers = 4;
constexpr std::size_t kElements = 100'001;

bool keep_waiting() { return true; }

void check(const poseidon::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

/// The mean of each element without the smallest and the largest one. Needs three workers or more.
struct TrimmedMean {
  template <typename T>
  void operator()(const poseidon::AggregateCall<T>& call) const {
    std::vector<T> column(call.contributions.size());
    for (std::size_t i = 0; i < call.result.size(); ++i) {
      for (std::size_t rank = 0; rank < column.size(); ++rank) column[rank] = call.contributions[rank][i];
      std::ranges::sort(column);
      T sum = 0;
      for (std::size_t rank = 1; rank + 1 < column.size(); ++rank) sum += column[rank];
      call.result[i] = sum / static_cast<T>(column.size() - 2);
    }
  }
};

void work(int rank, std::uint16_t port) {
  poseidon::Options options;
  options.rank = rank;
  options.world_size = kWorkers;
  options.master_port = port;
  auto connected = poseidon::Client::connect(options, nullptr, keep_waiting);
  check(connected.status());
  poseidon::Client& client = *connected.value();

  poseidon::Layer layer;
  layer.name = "w";
  layer.element_count = kElements;
  layer.stored = true;
  const auto added = client.add_layers({layer}, false, keep_waiting);
  check(added.status());
  const std::uint32_t id = added.value().first_layer;
  std::vector<float> values(kElements, 1.F);
  if (rank == 0) {
    check(client.assign(id, std::as_bytes(std::span(values))));
    check(client.wait(id, keep_waiting));
  }

  auto rule = poseidon::make_update_rule("sgd", {{"lr", 0.5}});
  check(rule.status());
  rule.value().aggregator = "trimmed_mean";
  check(client.set_rule(id, rule.value()));
  // The gradients are 1, 2, 3, and from a broken worker a million. The trimmed mean is 2.5.
  const std::vector<float> gradient(kElements, rank == 3 ? 1e6F : static_cast<float>(rank + 1));
  check(client.push_pull(id, std::as_bytes(std::span(gradient)), std::as_writable_bytes(std::span(values)), kWorkers));
  check(client.wait(id, keep_waiting));
  for (const float value : values) {
    if (value == 1.F - 0.5F * 2.5F) continue;
    std::fprintf(stderr, "found %g\n", value);
    std::exit(1);
  }
  client.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  check(poseidon::register_aggregator({"trimmed_mean", TrimmedMean(), TrimmedMean()}));
  const auto port = static_cast<std::uint16_t>(argc > 1 ? std::stoi(argv[1]) : 29500);
  std::vector<std::thread> workers;
  for (int rank = 0; rank < kWorkers; ++rank) workers.emplace_back(work, rank, port);
  for (std::thread& worker : workers) worker.join();
  std::printf("Every worker has parameters that the broken one could not spoil.\n");
}
