// Two workers, here two threads of one process, exchange a gradient and keep an array on the servers.
// Usage: push_pull [PORT], the port at which the workers find each other.
#include <poseidon/client.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kWorkers = 2;
constexpr std::size_t kElements = 100'000;

bool keep_waiting() { return true; }

void check(const poseidon::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

void check_all(const std::vector<float>& values, float expected) {
  for (const float value : values) {
    if (value == expected) continue;
    std::fprintf(stderr, "found %g, expected %g\n", value, expected);
    std::exit(1);
  }
}

void work(int rank, std::uint16_t port) {
  poseidon::Options options;
  options.rank = rank;
  options.world_size = kWorkers;
  options.master_port = port;
  auto connected = poseidon::Client::connect(options, nullptr, keep_waiting);
  check(connected.status());
  poseidon::Client& client = *connected.value();

  poseidon::Layer gradient;
  gradient.name = "gradient";
  gradient.element_count = kElements;
  poseidon::Layer stored = gradient;
  stored.name = "stored";
  stored.stored = true;
  const auto added = client.add_layers({gradient, stored}, false, keep_waiting);
  check(added.status());
  const std::uint32_t gradient_id = added.value().first_layer;  // ids follow the order of the layers
  const std::uint32_t stored_id = gradient_id + 1;

  // The workers' gradients, 1 and 2, are replaced by their mean.
  std::vector<float> values(kElements, static_cast<float>(rank + 1));
  check(client.start(gradient_id, std::as_writable_bytes(std::span(values)), kWorkers));
  check(client.wait(gradient_id, keep_waiting));
  check_all(values, 1.5F);

  // Each worker pushes; the servers keep the mean; each worker pulls it.
  values.assign(kElements, static_cast<float>(10 * (rank + 1)));
  check(client.push(stored_id, std::as_bytes(std::span(values)), kWorkers));
  check(client.wait(stored_id, keep_waiting));
  check(client.pull(stored_id, std::as_writable_bytes(std::span(values))));
  check(client.wait(stored_id, keep_waiting));
  check_all(values, 15.F);
  // This worker's server leaves with it, and the other worker may still pull. Adding no layer waits for all workers.
  check(client.add_layers({}, false, keep_waiting).status());
  client.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const auto port = static_cast<std::uint16_t>(argc > 1 ? std::stoi(argv[1]) : 29500);
  std::vector<std::thread> workers;
  for (int rank = 0; rank < kWorkers; ++rank) workers.emplace_back(work, rank, port);
  for (std::thread& worker : workers) worker.join();
  std::printf("Every worker has the mean, 1.5, and has pulled the stored mean, 15.\n");
}
