// powersgd: the gradient as a matrix of low rank, in two small exchanges with the servers (Vogels et al. 2019;
// docs/lossy.md). First come the left vectors, the gradients times the right vectors of the step before. Their sum is
// orthonormalized. Then come the right vectors, the transposed gradients times those.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/invariant.h"
#include "kernel/compression.h"
#include "poseidon/plan.h"
#include "scheme/parameter_server.h"
#include "scheme/peer_broadcast.h"
#include "wire/messages/contribution.h"

namespace poseidon {

namespace {

constexpr std::size_t kMinSliceFloats = 1024;
/// A layer is compressed if that makes it smaller by more than this factor, as with torch's hook.
constexpr std::size_t kLeastCompression = 2;

kernel::LowRank shape_of(const Layer& layer) {
  const Compression& compression = layer.compression;
  const std::size_t rows = std::max<std::size_t>(1, compression.rows);
  return {rows, layer.element_count / rows, compression.powersgd_rank};
}

bool fits(const Layer& layer) {
  const kernel::LowRank shape = shape_of(layer);
  return layer.compression.rows > 0 && (shape.rows + shape.cols) * shape.rank * kLeastCompression < layer.element_count;
}

SchemeCost powersgd_cost(std::size_t rows, std::size_t cols, double rank, const Cluster& cluster) {
  const double workers = cluster.worker_count;
  const double servers = cluster.server_count;
  const double vectors = rank * (static_cast<double>(rows) + static_cast<double>(cols));
  return {2 * vectors, 2 * workers * vectors / servers, 2 * vectors * (workers + servers - 2) / servers};
}

/// A part of the vectors, and the chunk whose way to its server it goes.
struct Slice {
  const Chunk* chunk = nullptr;
  std::size_t begin = 0;  // in floats
  std::size_t end = 0;
};

/// Cuts an array of floats into equal slices for the servers that have chunks of the unit.
std::vector<Slice> slices_of(const Unit& unit, std::size_t float_count) {
  std::vector<Slice> slices;
  for (const Chunk& chunk : unit.chunks)
    if (std::ranges::none_of(slices, [&](const Slice& slice) { return slice.chunk->server == chunk.server; }))
      slices.push_back({&chunk});
  // Layers whose vectors are too small for all servers begin with different ones.
  const std::size_t count = std::clamp<std::size_t>(float_count / kMinSliceFloats, 1, slices.size());
  const auto first = slices.begin() + static_cast<std::ptrdiff_t>(unit.id % slices.size());
  std::rotate(slices.begin(), first, slices.end());  // clang 14 cannot compile the one of std::ranges
  slices.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    slices[i].begin = float_count * i / count;
    slices[i].end = float_count * (i + 1) / count;
  }
  return slices;
}

/// The state of an exchange, in memory of the pool and of the unit.
struct State {
  explicit State(Exchange& exchange) : shape(shape_of(*exchange.about.layer)) {
    auto& buffers = exchange.progress.converted;
    invariant(buffers.size() >= 3, "the vectors have their memory from the start of the exchange");
    left = reinterpret_cast<float*>(buffers[0].data());
    own = reinterpret_cast<float*>(buffers[1].data());
    total = reinterpret_cast<float*>(buffers[2].data());
    residual = reinterpret_cast<float*>(exchange.kept.memory_of(kept_count(*exchange.about.layer)).data());
    right = residual + exchange.about.layer->element_count;
    if (const auto* dense = exchange.gradient<DenseGradient>())
      gradient = reinterpret_cast<const float*>(dense->data.data());
    result = reinterpret_cast<float*>(exchange.progress.result.data());
  }
  /// What the servers add up in this round: sent from `sent()`, and received into `received()`.
  std::size_t float_count(int round) const { return shape.rank * (round == 0 ? shape.rows : shape.cols); }
  float* sent(int round) const { return round == 0 ? left : own; }
  float* received(int round) const { return round == 0 ? left : total; }

  kernel::LowRank shape;
  float* left = nullptr;            // the left vectors of this worker, and then their sum
  float* own = nullptr;             // the right vectors of this worker
  float* total = nullptr;           // their sum
  float* residual = nullptr;        // kept from step to step
  float* right = nullptr;           // the right vectors of the last step, which all workers keep
  const float* gradient = nullptr;  // null: this worker has none
  float* result = nullptr;
};

class PowerSgd final : public ParameterServer {
 public:
  PowerSgd()
      : ParameterServer({
            .title = "low rank",
            .summary = "Lossy: the gradient as a matrix of low rank, through the servers. The rest waits for later "
                       "steps.",
            .lossy = true,
            .uses_servers = true,
            .cost = powersgd_cost,
            .keeps_after_result = true,
            .count_of = [](const Layer& layer) { return static_cast<double>(layer.compression.powersgd_rank); },
            .fits = fits,
            .kept_count =
                [](const Layer& layer) {
                  const kernel::LowRank shape = shape_of(layer);
                  return layer.element_count + shape.rank * shape.cols;
                },
        }) {}

  void start(Exchange& exchange, const Links& links) const override {
    Progress& progress = exchange.progress;
    const kernel::LowRank shape = shape_of(*exchange.about.layer);
    for (const std::size_t length : {shape.rows, shape.cols, shape.cols})
      progress.converted.push_back(links.pool->take(shape.rank * length * sizeof(float)));
    const State state(exchange);
    progress.contributing = true;
    progress.answers.emplace().chunks.assign(exchange.unit().chunks.size(), ChunkArrival::received);
    kernel::refresh(shape.rank, shape.cols, state.right);
    if (state.gradient == nullptr) return push(exchange, links);
    compute_ranges(
        exchange, links, most_jobs(exchange), shape.rows,
        [state](std::size_t begin, std::size_t end) {
          kernel::multiply_right(state.shape, state.gradient, state.residual, state.right, begin, end, state.left);
        },
        [&exchange, &links] { push(exchange, links); });
  }

  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const override {
    if (Status status = check_awaited(exchange, header, links); !status.ok()) return status;
    const std::span<std::byte> place = place_of(exchange, header.chunk);
    if (Status status = check_payload(header, DType::float32, place.size()); !status.ok()) return status;
    exchange.progress.awaited().chunks[header.chunk] = ChunkArrival::accepted;
    return lent || header.payload_bytes == 0 ? std::span<std::byte>() : place;
  }

  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const override {
    ServerAnswers& answers = exchange.progress.awaited();
    const std::span<std::byte> place = place_of(exchange, header.chunk);
    // A shard of this process lends its result instead of writing it here.
    if (!payload.empty() && payload.data() != place.data()) std::memcpy(place.data(), payload.data(), payload.size());
    const auto result = wire::StepResult::read(header);
    if (!links.is_local(exchange.unit().chunks[header.chunk]))
      exchange.outcome.bytes_received += wire::kHeaderBytes + header.payload_bytes;
    exchange.outcome.factor_count = result.factor_count;
    exchange.outcome.present = !result.absent;
    invariant(answers.chunks[header.chunk] == ChunkArrival::accepted && answers.missing_count > 0,
              "an answer completes once, after it was accepted");
    answers.chunks[header.chunk] = ChunkArrival::received;
    if (--answers.missing_count == 0) end_round(exchange, links);
    exchange.complete_if_done();
    return {};
  }

  std::string waiting_for(const Exchange& exchange, const Links& /*links*/) const override {
    const auto& arrivals = exchange.progress.awaited().chunks;
    const auto first = std::ranges::find_if(arrivals, [](auto arrival) { return arrival != ChunkArrival::received; });
    if (first == arrivals.end()) return "compressing its gradient";
    const Chunk& chunk = exchange.unit().chunks[static_cast<std::size_t>(first - arrivals.begin())];
    return concat("waiting for the ", exchange.progress.round == 0 ? "left" : "right", " vectors from server ",
                  chunk.server);
  }

 private:
  static std::size_t most_jobs(const Exchange& exchange) {
    return exchange.about.layer->element_count / kMinElementsPerJob;
  }

  /// Returns where the sum that this chunk's server sends in this round is written.
  static std::span<std::byte> place_of(Exchange& exchange, std::uint32_t chunk) {
    const State state(exchange);
    const int round = exchange.progress.round;
    for (const Slice& slice : slices_of(exchange.unit(), state.float_count(round)))
      if (slice.chunk->index == chunk)
        return std::as_writable_bytes(std::span(state.received(round) + slice.begin, slice.end - slice.begin));
    return {};
  }

  /// Sends this round's vectors to the servers, or that this worker has none.
  static void push(Exchange& exchange, const Links& links) {
    const State state(exchange);
    Progress& progress = exchange.progress;
    wire::Contribution body = contribution_of(exchange, links, wire::Kind::push);
    body.divisor = 1;
    const auto slices = slices_of(exchange.unit(), state.float_count(progress.round));
    ServerAnswers& answers = progress.awaited();
    answers.missing_count = slices.size();
    for (const Slice& slice : slices) answers.chunks[slice.chunk->index] = ChunkArrival::awaited;
    if (progress.round == 1) progress.contributing = false;
    for (const Slice& slice : slices) {
      wire::Header header = body.make();
      header.chunk = slice.chunk->index;
      Pieces payload;
      const std::span values(state.sent(progress.round) + slice.begin, slice.end - slice.begin);
      if (state.gradient != nullptr) payload.push_back(std::as_bytes(values));
      send_to_server(exchange, links, *slice.chunk, header, std::move(payload));
    }
  }

  /// The sum of this round's vectors is here. It is the same on all ranks, and so is what they do with it.
  void end_round(Exchange& exchange, const Links& links) const {
    if (!exchange.outcome.present) return end(exchange);
    if (exchange.progress.round == 0) return multiply(exchange, links);
    finish(exchange, links);
  }

  static void end(Exchange& exchange) {
    exchange.progress.received = true;
    exchange.progress.contributing = false;
  }

  /// Makes the left vectors orthonormal, and the right vectors of this worker.
  void multiply(Exchange& exchange, const Links& links) const {
    const State state(exchange);
    const auto finite = std::make_shared<bool>();
    compute(
        exchange, links, 1,
        [state, finite](std::size_t) {
          *finite = kernel::orthonormalize(state.shape.rank, state.shape.rows, state.left);
        },
        [&exchange, &links, state, finite] {
          exchange.progress.round = 1;
          if (!*finite) return spoil(exchange);
          if (state.gradient == nullptr) return push(exchange, links);
          compute_ranges(
              exchange, links, most_jobs(exchange), state.shape.cols,
              [state](std::size_t begin, std::size_t end) {
                kernel::multiply_left(state.shape, state.gradient, state.residual, state.left, begin, end, state.own);
              },
              [&exchange, &links] { push(exchange, links); });
        });
  }

  /// Some gradient is not finite: every rank gets NaN, and what it keeps stays as it is.
  static void spoil(Exchange& exchange) {
    const State state(exchange);
    std::fill_n(state.result, exchange.about.layer->element_count, std::numeric_limits<float>::quiet_NaN());
    end(exchange);
  }

  /// Makes the result, and the residual.
  static void finish(Exchange& exchange, const Links& links) {
    const State state(exchange);
    const std::size_t vectors = state.shape.rank * state.shape.cols;
    if (!std::all_of(state.total, state.total + vectors, [](float value) { return std::isfinite(value); }))
      return spoil(exchange);
    end(exchange);
    const unsigned divisor = exchange.push()->divisor;
    compute_ranges(
        exchange, links, most_jobs(exchange), state.shape.rows,
        [state, divisor](std::size_t begin, std::size_t end) {
          kernel::subtract_low_rank(state.shape, state.gradient, state.residual, state.left, state.own, state.total,
                                    begin, end, divisor, state.result);
        },
        [state, vectors] { std::copy_n(state.total, vectors, state.right); });
  }
};

}  // namespace

const SchemeProtocol& powersgd_scheme() { return only_one<PowerSgd>(); }

}  // namespace poseidon
