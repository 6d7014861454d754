// rows: every worker sends the rows that its gradient has to every other worker, and every worker adds all of them up
// itself. It is for embeddings, whose gradients have few rows of a large table.
#include "wire/messages/rows.h"

#include <algorithm>
#include <cstring>

#include "kernel/kernel.h"
#include "scheme/peer_broadcast.h"

namespace poseidon {

namespace {

/// `row_count` is the number of different rows in one worker's gradient. An index counts as one number.
SchemeCost rows_cost(std::size_t /*rows*/, std::size_t cols, double row_count, const Cluster& cluster) {
  const double cost = 2 * (cluster.worker_count - 1.0) * row_count * (static_cast<double>(cols) + 1);
  return {cost, 0, cost};
}

class Rows final : public ExactBroadcast {
 public:
  Rows()
      : ExactBroadcast(
            {
                .title = "rows",
                .summary = "The rows that an embedding's gradient has, to every worker.",
                .takes_rows = true,
                .converts = true,
                .uses_peers = true,
                .automatic = true,
                .cost = rows_cost,
            },
            wire::Kind::rows) {}

 private:
  Pieces make_part(Exchange& exchange, const Links& links, Part& own, wire::Contribution& body) const override {
    const LayerRows& given = *exchange.gradient<LayerRows>();
    const std::size_t count = given.indexes.size();
    if (count == 0) return {};
    auto& kept = exchange.progress.converted;
    // The caller's indexes may be of any length, and the values have to begin at a multiple of 8 bytes.
    const std::span<std::byte> indexes = kept.emplace_back(links.pool->take(wire::RowList::index_bytes(count))).span();
    std::ranges::fill(indexes.last(8), std::byte{0});
    std::memcpy(indexes.data(), given.indexes.data(), given.indexes.size_bytes());
    std::span<const std::byte> values = given.values;
    if (exchange.unit().converts_factors()) {
      const std::size_t value_count = count * exchange.about.cols;
      const std::span<std::byte> narrow =
          kept.emplace_back(links.pool->take(array_bytes(body.dtype, value_count))).span();
      kernel::encode(body.dtype, reinterpret_cast<const float*>(values.data()), narrow.data(), value_count);
      values = narrow;
    }
    own.rows = {reinterpret_cast<const std::uint32_t*>(indexes.data()), values.data(), count};
    return {indexes, values};
  }

  std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const override {
    return body.dtype == exchange.unit().factor_dtype ? wire::RowList::payload_bytes(body) : std::nullopt;
  }

  Status read_part(const Exchange& exchange, const wire::Contribution& body, Part& part) const override {
    if (body.dense) {
      part.rows = {nullptr, part.buffer.data(), exchange.about.rows};
      return {};
    }
    const auto list = wire::RowList::read(body, part.buffer.span());
    if (!list.ok()) return list.status();
    part.rows = {list.value().indexes.data(), list.value().values.data(), list.value().indexes.size()};
    return {};
  }

  void finish(Exchange& exchange, const Links& links) const override {
    std::vector<kernel::RowTerm> terms;
    std::size_t row_count = 0;
    bool dense = false;
    for (const Part& part : exchange.progress.inbox_of<PeerInbox>().parts) {
      if (part.rows.count > 0) terms.push_back(part.rows);
      dense = dense || (part.rows.count > 0 && part.rows.indexes == nullptr);
      row_count += part.rows.count;
    }
    exchange.progress.row_result.emplace();
    if (exchange.progress.result.empty()) make_memory(exchange, links, std::min(row_count, exchange.about.rows));
    exchange.progress.row_result->rows.dense = dense;
    compute(exchange, links, 1, [&exchange, terms = std::move(terms)](std::size_t) { add_up(exchange, terms); });
  }

  /// Takes memory for a result of at most `row_count` rows: the indexes, and then the rows.
  static void make_memory(Exchange& exchange, const Links& links, std::size_t row_count) {
    const std::size_t row_bytes = exchange.about.cols * dtype_bytes(exchange.unit().dtype);
    const std::size_t index_bytes = wire::RowList::index_bytes(row_count);
    RowResult& result = *exchange.progress.row_result;
    result.memory = links.pool->take(index_bytes + row_count * row_bytes);
    result.rows.indexes = {reinterpret_cast<std::uint32_t*>(result.memory.data()), row_count};
    result.rows.values = result.memory.span().subspan(index_bytes);
  }

  static void add_up(Exchange& exchange, std::span<const kernel::RowTerm> terms) {
    Progress& progress = exchange.progress;
    const Unit& unit = exchange.unit();
    const auto sum = [&](std::uint32_t* indexes, std::byte* values) {
      return kernel::sum_rows(terms, unit.factor_dtype, unit.dtype, exchange.about.cols, exchange.push()->divisor,
                              indexes, values);
    };
    if (!progress.result.empty()) {
      if (!progress.row_result->rows.dense) std::ranges::fill(progress.result, std::byte{0});
      sum(nullptr, progress.result.data());
      return;
    }
    LayerRows& rows = progress.row_result->rows;
    std::byte* const memory = progress.row_result->memory.data();
    auto* const indexes = reinterpret_cast<std::uint32_t*>(memory);
    auto* const values = memory + (rows.values.data() - memory);
    const std::size_t count = sum(indexes, values);
    rows.indexes = rows.indexes.first(rows.dense ? 0 : count);
    rows.values = rows.values.first(count * exchange.about.cols * dtype_bytes(unit.dtype));
  }
};

}  // namespace

const SchemeProtocol& rows_scheme() { return only_one<Rows>(); }

}  // namespace poseidon
