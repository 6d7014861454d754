#include "client/chunk_search.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/clock.h"
#include "plan/partition.h"

namespace poseidon {

namespace {

constexpr std::array<std::size_t, 6> kCandidates{32u << 10, 64u << 10, 128u << 10, 256u << 10, 512u << 10, 1u << 20};
constexpr std::size_t kFirstProbeBytes = 256u << 10;
constexpr std::size_t kLargestProbeBytes = 32u << 20;
constexpr std::int64_t kProbeNs = 40'000'000;  // the wanted time of one exchange, well above the noise
constexpr int kRounds = 4;                     // the fastest counts; the first one touches new memory

Layer probe_layer(const std::string& name, std::size_t element_count, DType dtype) {
  Layer layer;
  layer.name = name;
  layer.dtype = dtype;
  layer.element_count = element_count;
  layer.scheme = Scheme::ps;
  return layer;
}

/// Exchanges layers that are used for nothing else. Every rank makes the same calls.
class Probe {
 public:
  Probe(Client& client, const std::function<bool()>& keep_waiting) : client_(client), keep_waiting_(keep_waiting) {}

  /// Returns the sum over the ranks.
  Result<std::int64_t> sum(std::int64_t mine) {
    auto layer = add("chunk search sum", 1, DType::int64);
    if (!layer.ok()) return layer.status();
    if (Status status = exchange(layer.value(), std::as_writable_bytes(std::span(&mine, 1))); !status.ok())
      return status;
    return mine;
  }

  /// Returns the time of the fastest of a few exchanges of `size_bytes`, in nanoseconds, summed over the ranks.
  Result<std::int64_t> time(std::size_t size_bytes) {
    auto layer = add("chunk search", size_bytes / sizeof(float), DType::float32);
    if (!layer.ok()) return layer.status();
    std::vector<float> values(size_bytes / sizeof(float), 0.0F);
    std::int64_t best_ns = INT64_MAX;
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t begin_ns = now_ns();
      if (Status status = exchange(layer.value(), std::as_writable_bytes(std::span(values))); !status.ok())
        return status;
      best_ns = std::min(best_ns, now_ns() - begin_ns);
    }
    return sum(best_ns);
  }

 private:
  Result<std::uint32_t> add(const std::string& name, std::size_t element_count, DType dtype) {
    auto added = client_.add_layers({probe_layer(name, element_count, dtype)}, true, keep_waiting_);
    return added.ok() ? Result<std::uint32_t>(added.value().first_layer) : added.status();
  }
  Status exchange(std::uint32_t layer, std::span<std::byte> data) {
    if (Status status = client_.start(layer, data, 1); !status.ok()) return status;
    return client_.wait(layer, keep_waiting_);
  }

  Client& client_;
  const std::function<bool()>& keep_waiting_;
};

}  // namespace

Result<std::size_t> choose_chunk_bytes(Client& client, Steps& steps, std::size_t known,
                                       const std::function<bool()>& keep_waiting) {
  Probe probe(client, keep_waiting);
  auto agreed = probe.sum(client.rank() == 0 ? static_cast<std::int64_t>(known) : 0);
  if (!agreed.ok()) return agreed.status();
  auto best = static_cast<std::size_t>(agreed.value());
  if (best == 0) {
    auto first_ns = probe.time(kFirstProbeBytes);
    if (!first_ns.ok()) return first_ns.status();
    const double mean_ns = static_cast<double>(first_ns.value()) / client.world_size();
    const double wanted_bytes = static_cast<double>(kFirstProbeBytes) * static_cast<double>(kProbeNs) / mean_ns;
    const auto probe_bytes = std::clamp(static_cast<std::size_t>(wanted_bytes) / sizeof(float) * sizeof(float),
                                        kFirstProbeBytes, kLargestProbeBytes);
    std::int64_t best_ns = INT64_MAX;
    const auto base = steps.plan_base();
    if (!base.ok()) return base.status();
    for (const std::size_t candidate : kCandidates) {
      if (most_chunk_bytes(base.value().cluster, candidate) < candidate) break;  // the same plan as the last one
      steps.set_chunk_bytes(candidate);
      auto time_ns = probe.time(probe_bytes);
      if (!time_ns.ok()) return time_ns.status();
      if (time_ns.value() < best_ns) {
        best_ns = time_ns.value();
        best = candidate;
      }
    }
  }
  steps.set_chunk_bytes(best);
  return best;
}

}  // namespace poseidon
