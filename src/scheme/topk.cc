// topk: every worker sends the elements of largest magnitude to every other worker, and every worker adds all of them
// up itself (docs/lossy.md).
#include <algorithm>
#include <cmath>

#include "kernel/compression.h"
#include "poseidon/plan.h"
#include "scheme/peer_broadcast.h"
#include "wire/messages/rows.h"

namespace poseidon {

namespace {

/// The number of elements that each worker sends.
std::size_t count_of(const Layer& layer) {
  const double wanted = std::ceil(layer.compression.topk_fraction * static_cast<double>(layer.element_count));
  return std::min(layer.element_count, static_cast<std::size_t>(wanted));
}

/// An index counts as one number.
SchemeCost topk_cost(std::size_t /*rows*/, std::size_t /*cols*/, double count, const Cluster& cluster) {
  const double cost = 2 * (cluster.worker_count - 1.0) * 2 * count;
  return {cost, 0, cost};
}

class TopK final : public CompressedBroadcast {
 public:
  TopK()
      : CompressedBroadcast(
            {
                .title = "largest elements",
                .summary = "Lossy: the largest elements, to every worker. The rest waits for later steps.",
                .lossy = true,
                .uses_peers = true,
                .cost = topk_cost,
                .count_of = [](const Layer& layer) { return static_cast<double>(count_of(layer)); },
            },
            wire::Kind::topk) {}

 private:
  std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const override {
    if (exchange.about.layer == nullptr || body.dtype != DType::float32) return std::nullopt;
    return wire::TopK::payload_bytes(count_of(*exchange.about.layer));
  }

  void compress(const ExchangeUnit& about, const float* gradient, float* residual,
                std::span<std::byte> part) const override {
    const std::size_t count = count_of(*about.layer);
    const std::span indexes(reinterpret_cast<std::uint32_t*>(part.data()), count);
    auto* const values = reinterpret_cast<float*>(part.data() + indexes.size_bytes());
    kernel::take_largest(gradient, residual, about.layer->element_count, indexes, values);
  }

  Status read_part(const Exchange& exchange, const wire::Contribution& /*body*/, Part& part) const override {
    const auto list = wire::TopK::read(part.buffer.span(), exchange.about.layer->element_count);
    if (!list.ok()) return list.status();
    part.rows = {list.value().indexes.data(), list.value().values.data(), list.value().indexes.size()};
    return {};
  }

  void finish(Exchange& exchange, const Links& links) const override {
    std::vector<kernel::RowTerm> terms;
    for (const Part& part : exchange.progress.inbox_of<PeerInbox>().parts)
      if (part.present) terms.push_back(part.rows);
    const std::size_t element_count = exchange.about.layer->element_count;
    compute_ranges(exchange, links, element_count / kMinElementsPerJob, element_count,
                   [&exchange, terms = std::move(terms)](std::size_t begin, std::size_t end) {
                     auto* const out = reinterpret_cast<float*>(exchange.progress.result.data());
                     kernel::sum_sparse(terms, begin, end, exchange.push()->divisor, out);
                   });
  }
};

}  // namespace

const SchemeProtocol& topk_scheme() { return only_one<TopK>(); }

}  // namespace poseidon
