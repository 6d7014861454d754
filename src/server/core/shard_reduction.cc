// How a shard makes the sum of a step that has all its parts: at once, piece by piece, or with many threads.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/invariant.h"
#include "base/named_registry.h"
#include "kernel/kernel.h"
#include "server/chunk/aggregate.h"
#include "server/core/shard.h"
#include "wire/update_rule.h"

namespace poseidon {

namespace {

// The number of multiplications in a piece of a product. They take about a millisecond. A piece is also a multiple of
// this many rows.
constexpr std::size_t kProductOperations = std::size_t{1} << 24;
constexpr std::size_t kProductRows = 128;

}  // namespace

void Shard::Entry::finish_if_all_here() {
  if (!state.all_here()) return;
  if (!state.any_present()) return shard.finish(*this, Buffer());
  if (state.aggregator() != nullptr) return shard.finish(*this, aggregate(state, *shard.pool_));
  if (state.is_product()) return shard.multiply(*this);
  if (shard.threads_.wide != nullptr && !state.shape().float32_value) return shard.sum_on_threads(*this);
  shard.finish(*this, state.take_sum());
}

/// Returns null for the sum. ErrorCode::refused: a rule that this shard cannot use.
Result<const Aggregator*> Shard::aggregator_of(const UpdateRule& rule) const {
  const std::string& name = rule.aggregator;
  const auto refused = [](const std::string& why) { return Status(ErrorCode::refused, why); };
  if (Status why = wire::check_rule_with(features_, rule); !why.ok()) return refused(why.message());
  if (name == kSumAggregator) return nullptr;
  if (const Aggregator* known = find_aggregator(name); known != nullptr) return known;
  return refused("this server knows no aggregator '" + name + "', but " + list_of(aggregator_names()) +
                 "; register it in the server's process, too (register_aggregator)");
}

/// A product of factors that is made piece by piece. Between the pieces the loop's other flows and jobs have their
/// turns.
struct Shard::Product {
  std::uint64_t key = 0;
  wire::Contribution shape;
  std::vector<kernel::FactorTerm> terms;
  unsigned divisor = 1;
  Buffer out;
  std::size_t next_row = 0;
  std::size_t rows_at_once = 0;
};

void Shard::multiply(Entry& entry) {
  const wire::Contribution& shape = entry.state.shape();
  const auto product = std::make_shared<Product>(
      Product{key_of(shape), shape, entry.state.factor_terms(), entry.state.divisor(), {}, 0, shape.rows});
  product->out = pool_->try_take(shape.payload_bytes);
  if (!product->out) return finish(entry, no_room(shape.payload_bytes));
  invariant(!entry.computing, "a step is reduced once");
  entry.computing = true;
  if (threads_.loop != nullptr) {
    const std::size_t row_operations =
        std::size_t{shape.cols} * std::max<std::size_t>(1, entry.state.factor_count_sum());
    product->rows_at_once = std::max(kProductRows, kProductOperations / row_operations / kProductRows * kProductRows);
  }
  multiply_rows(product);
}

/// Makes the next rows. The parts stay until the last rows are made, because the entry is computing.
void Shard::multiply_rows(const std::shared_ptr<Product>& product) {
  Product& made = *product;
  const std::size_t end_row = std::min<std::size_t>(made.next_row + made.rows_at_once, made.shape.rows);
  kernel::factor_product(made.terms, made.out.data(), made.shape.dtype, made.shape.rows, made.shape.cols, made.next_row,
                         end_row, made.divisor, false);
  made.next_row = end_row;
  if (end_row < made.shape.rows)
    return threads_.loop->post([this, product, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired()) multiply_rows(product);
    });
  Entry& entry = entries_.at(made.key);
  entry.computing = false;
  finish(entry, std::move(made.out));
}

void Shard::sum_on_threads(Entry& entry) {
  const wire::Contribution& shape = entry.state.shape();
  const auto out = std::make_shared<Buffer>(pool_->try_take(shape.payload_bytes));
  if (!*out) return finish(entry, no_room(shape.payload_bytes));
  invariant(!entry.computing, "a step is reduced once");
  entry.computing = true;
  entry.computed =
      threads_.wide->sum(entry.state.dense_inputs(), shape, out->data(),
                         [this, key = key_of(shape), out, loop = threads_.loop, alive = std::weak_ptr<bool>(alive_)] {
                           loop->post([this, key, out, alive] {
                             if (alive.expired()) return;
                             Entry& done = entries_.at(key);
                             done.computing = false;
                             finish(done, std::move(*out));
                           });
                         });
}

}  // namespace poseidon
