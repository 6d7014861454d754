#include "server/shard.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "kernel/kernel.h"

namespace poseidon {

namespace {

/// K summed over the workers; saturates where one of them has no factors to send.
std::uint32_t sum_factor_counts(std::vector<std::optional<Contribution>>& parts) {
  std::uint64_t total = 0;
  for (const auto& part : parts) total += part->header.factor_count;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(total, wire::kUnboundedFactors));
}

std::vector<kernel::FactorTerm> factor_terms(std::vector<std::optional<Contribution>>& parts) {
  std::vector<kernel::FactorTerm> terms;
  for (const auto& part : parts) {
    if (!part->present()) continue;
    const wire::Header& header = part->header;
    kernel::FactorTerm term;
    term.dtype = header.dtype;
    if (part->has_factors()) {
      term.left = part->payload.data();
      term.right = term.left + std::size_t{header.factor_count} * header.rows * dtype_bytes(header.dtype);
      term.count = header.factor_count;
    } else {
      term.dense = part->payload.data();
    }
    terms.push_back(term);
  }
  return terms;
}

}  // namespace

Status Shard::add(Contribution contribution) {
  const std::uint64_t key = std::uint64_t{contribution.header.unit} << 32 | contribution.header.chunk;
  const bool transient = (contribution.header.flags & wire::kTransient) != 0;
  auto found = chunks_.try_emplace(key, worker_count_).first;
  ChunkState& chunk = found->second;
  if (Status status = chunk.add(contribution); !status.ok()) {
    release(contribution);
    if (!chunk.started()) chunks_.erase(found);
    return status;
  }
  if (chunk.complete()) {
    finish(chunk);
    if (transient) chunks_.erase(found);
  }
  return {};
}

void Shard::finish(ChunkState& chunk) {
  auto& parts = chunk.parts();
  wire::Header header = chunk.shape();
  header.kind = wire::Kind::result;
  header.factor_count = sum_factor_counts(parts);
  const bool any = std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part->present(); });
  header.flags = static_cast<std::uint8_t>(any ? 0 : wire::kAbsent);
  const std::shared_ptr<Buffer> payload = any ? reduce(chunk, chunk.shape().payload_bytes) : nullptr;
  for (auto& part : parts) release(*part);
  chunk.reset();
  for (std::uint32_t rank = 0; rank < worker_count_; ++rank) {
    header.rank = rank;
    send_(rank, header, payload);
  }
}

std::shared_ptr<Buffer> Shard::reduce(ChunkState& chunk, std::size_t size_bytes) {
  auto& parts = chunk.parts();
  const wire::Header& shape = chunk.shape();
  const bool transient = (shape.flags & wire::kTransient) != 0;
  auto out = transient ? std::make_shared<Buffer>(size_bytes) : pool_->take_shared(size_bytes);
  if (std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part->has_factors(); })) {
    const auto terms = factor_terms(parts);
    kernel::factor_product(terms, out->data(), shape.dtype, shape.rows, shape.cols, 0, shape.rows, shape.divisor,
                           false);
    return out;
  }
  std::vector<const std::byte*> inputs;
  for (const auto& part : parts)
    if (part->present()) inputs.push_back(part->payload.data());
  kernel::sum(inputs, out->data(), size_bytes / dtype_bytes(shape.dtype), shape.dtype, shape.divisor);
  return out;
}

void Shard::release(Contribution& contribution) {
  if (contribution.release) contribution.release();
  contribution.release = nullptr;
  if ((contribution.header.flags & wire::kTransient) == 0) pool_->give_back(std::move(contribution.buffer));
}

void Shard::drop(std::uint32_t rank) {
  for (auto& [key, chunk] : chunks_)
    if (auto contribution = chunk.remove(rank)) release(*contribution);
}

void Shard::for_each_overdue(std::int64_t started_before_ns,
                             const std::function<void(const wire::Header&, const std::string&)>& visit) const {
  for (const auto& [key, chunk] : chunks_) {
    if (!chunk.started() || chunk.started_ns() > started_before_ns) continue;
    std::string ranks;
    for (const auto rank : chunk.missing_ranks()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    visit(chunk.shape(), "waiting for the push of rank " + ranks + " since " +
                             std::to_string((now_ns() - chunk.started_ns()) / 1'000'000) +
                             " ms; it is stopped, far behind or cut off: see its output, or raise POSEIDON_TIMEOUT");
  }
}

}  // namespace poseidon
