// onebit: every worker sends the sign of each value, with two means for each block, to every other worker, and every
// worker adds all of them up itself. It is the baseline of Poseidon §5.4, without CNTK's second quantization
// (docs/lossy.md).
#include <algorithm>

#include "kernel/compression.h"
#include "poseidon/plan.h"
#include "scheme/peer_broadcast.h"

namespace poseidon {

namespace {

constexpr std::size_t kMinBlocksPerJob = 512;

SchemeCost onebit_cost(std::size_t rows, std::size_t cols, double /*count*/, const Cluster& cluster) {
  const double part = static_cast<double>(kernel::one_bit_bytes(rows * cols)) / sizeof(float);
  const double cost = 2 * (cluster.worker_count - 1.0) * part;
  return {cost, 0, cost};
}

class OneBit final : public CompressedBroadcast {
 public:
  OneBit()
      : CompressedBroadcast(
            {
                .title = "one bit a value",
                .summary = "Lossy: the signs of blocks and their means, to every worker. The rest waits for later "
                           "steps.",
                .lossy = true,
                .uses_peers = true,
                .cost = onebit_cost,
            },
            wire::Kind::onebit) {}

 private:
  std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const override {
    if (exchange.about.layer == nullptr || body.dtype != DType::float32) return std::nullopt;
    return kernel::one_bit_bytes(exchange.about.layer->element_count);
  }

  void compress(const ExchangeUnit& about, const float* gradient, float* residual,
                std::span<std::byte> part) const override {
    kernel::encode_one_bit(gradient, residual, about.layer->element_count, part.data());
  }

  /// All bytes have a meaning.
  Status read_part(const Exchange& /*exchange*/, const wire::Contribution& /*body*/, Part& /*part*/) const override {
    return {};
  }

  void finish(Exchange& exchange, const Links& links) const override {
    std::vector<const std::byte*> terms;
    for (const Part& part : exchange.progress.inbox_of<PeerInbox>().parts)
      if (part.present) terms.push_back(part.buffer.data());
    const std::size_t element_count = exchange.about.layer->element_count;
    const std::size_t block_count = kernel::one_bit_bytes(element_count) / kernel::kOneBitBytes;
    compute_ranges(exchange, links, block_count / kMinBlocksPerJob, block_count,
                   [&exchange, element_count, terms = std::move(terms)](std::size_t begin, std::size_t end) {
                     kernel::sum_one_bit(terms, std::min(element_count, begin * kernel::kOneBitValues),
                                         std::min(element_count, end * kernel::kOneBitValues), exchange.push()->divisor,
                                         reinterpret_cast<float*>(exchange.progress.result.data()));
                   });
  }
};

}  // namespace

const SchemeProtocol& onebit_scheme() { return only_one<OneBit>(); }

}  // namespace poseidon
