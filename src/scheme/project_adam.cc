// project_adam: Project Adam's strategy, kept as a baseline. Factors go to the one shard that owns the matrix, which
// multiplies them and returns the dense gradient to all (Poseidon §3.2, Table 1).
#include "scheme/parameter_server.h"

namespace poseidon {

namespace {

SchemeCost project_adam_cost(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double workers = cluster.worker_count;
  const double dense = static_cast<double>(rows) * static_cast<double>(cols);
  const double factors = factor_count * (static_cast<double>(rows) + static_cast<double>(cols));
  return {dense + factors, workers * (dense + factors), (workers - 1) * (dense + factors)};
}

class ProjectAdam final : public ParameterServer {
 public:
  ProjectAdam()
      : ParameterServer({
            .title = "Project Adam's strategy",
            .summary = "Project Adam's: factors to one shard, the dense matrix back (baseline).",
            .takes_factors = true,
            .needs_whole_layer = true,
            .uses_servers = true,
            .baseline = true,
            .cost = project_adam_cost,
        }) {}

  void start(Exchange& exchange, const Links& links) const override {
    const auto* factored = exchange.gradient<FactoredGradient>();
    if (factored == nullptr) return ParameterServer::start(exchange, links);
    expect_results(exchange);
    const Chunk& whole = exchange.unit().chunks.front();  // the plan gives such a layer one chunk
    const wire::Header header = contribution_of(exchange, links, wire::Kind::factors).make();
    send_to_server(exchange, links, whole, header, factor_pieces(exchange.about, *factored));
  }
};

}  // namespace

const SchemeProtocol& project_adam_scheme() {
  static const ProjectAdam scheme;
  return scheme;
}

}  // namespace poseidon
