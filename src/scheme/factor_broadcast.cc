// sfb: every worker sends its factors to every other worker, and every worker multiplies all of them itself (Poseidon
// §3.2).

#include "scheme/conversion.h"
#include "scheme/peer_broadcast.h"

namespace poseidon {

namespace {

constexpr std::size_t kMinRowsPerJob = 64;

SchemeCost sfb_cost(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double factors = factor_count * (static_cast<double>(rows) + static_cast<double>(cols));
  const double cost = 2 * (cluster.worker_count - 1.0) * factors;
  return {cost, 0, cost};
}

double sfb_multiply_adds(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  return cluster.worker_count * factor_count * static_cast<double>(rows) * static_cast<double>(cols);
}

class FactorBroadcast final : public ExactBroadcast {
 public:
  FactorBroadcast()
      : ExactBroadcast(
            {
                .title = "sufficient factors",
                .summary = "Sufficient-factor broadcasting.",
                .takes_factors = true,
                .workers_multiply = true,
                .converts = true,
                .uses_peers = true,
                .automatic = true,
                .cost = sfb_cost,
                .multiply_adds = sfb_multiply_adds,
            },
            wire::Kind::factors) {}

 private:
  Pieces make_part(Exchange& exchange, const Links& links, Part& own, wire::Contribution& body) const override {
    convert_factors(exchange, links, NarrowFactors::stay);
    const FactoredGradient& factored = *exchange.gradient<FactoredGradient>();
    body.dtype = factored.dtype;
    for (const auto& rows : factored.rows) {
      kernel::FactorTerm term;
      term.dtype = factored.dtype;
      term.left = rows.left;
      term.right = rows.right;
      term.count = rows.count;
      own.terms.push_back(term);
    }
    return factor_pieces(exchange.about, factored);
  }

  std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const override {
    const bool takes = dtype_is_floating(body.dtype) && dtype_bytes(body.dtype) <= dtype_bytes(exchange.unit().dtype);
    return takes ? body.factor_bytes() : std::nullopt;
  }

  Status read_part(const Exchange& exchange, const wire::Contribution& body, Part& part) const override {
    kernel::FactorTerm term;
    term.dtype = body.dtype;
    if (body.dense) {
      term.dense = part.buffer.data();
    } else {
      term.left = part.buffer.data();
      term.right = term.left + std::size_t{body.factor_count} * exchange.about.rows * dtype_bytes(body.dtype);
      term.count = body.factor_count;
    }
    part.terms.push_back(term);
    return {};
  }

  /// Multiplies the parts on the executor, or leaves them to the caller.
  void finish(Exchange& exchange, const Links& links) const override {
    if (exchange.progress.result.empty()) return;
    std::vector<kernel::FactorTerm> terms;
    for (const auto& part : exchange.progress.inbox_of<PeerInbox>().parts)
      terms.insert(terms.end(), part.terms.begin(), part.terms.end());
    const auto* factored = exchange.gradient<FactoredGradient>();
    const bool accumulate = factored != nullptr && factored->accumulate;
    const std::size_t rows = exchange.about.rows;
    compute_ranges(exchange, links, rows / kMinRowsPerJob, rows,
                   [&exchange, accumulate, rows, terms = std::move(terms)](std::size_t begin, std::size_t end) {
                     kernel::factor_product(terms, exchange.progress.result.data(), exchange.unit().dtype, rows,
                                            exchange.about.cols, begin, end, exchange.push()->divisor, accumulate);
                   });
  }
};

}  // namespace

const SchemeProtocol& sfb_scheme() { return only_one<FactorBroadcast>(); }

}  // namespace poseidon
