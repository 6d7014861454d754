// How a shard makes the sum of a step whose parts are all here: at once, piece by piece, or with many threads.
#include <algorithm>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "kernel/kernel.h"
#include "server/core/shard.h"

namespace poseidon {

namespace {

// A piece of a product: so many multiplications, about a millisecond's, but a multiple of so many rows.
constexpr std::size_t kProductOperations = std::size_t{1} << 24;
constexpr std::size_t kProductRows = 128;

}  // namespace

void Shard::Entry::finish_if_all_here() {
  if (!state.all_here()) return;
  if (!state.any_present()) return shard.finish(*this, Buffer());
  if (state.is_product()) return shard.multiply(*this);
  if (shard.reduction_.aggregation == Aggregation::wide) return shard.reduce_wide(*this);
  shard.finish(*this, state.take_sum());
}

/// A product of factors that is made piece by piece, between which the loop's other flows and jobs have their turns.
struct Shard::Product {
  std::uint64_t key = 0;
  wire::Header shape;
  std::vector<kernel::FactorTerm> terms;
  unsigned divisor = 1;
  Buffer out;
  std::size_t next_row = 0;
  std::size_t rows_at_once = 0;
};

void Shard::multiply(Entry& entry) {
  const wire::Header& shape = entry.state.shape();
  const auto product = std::make_shared<Product>(
      Product{key_of(shape), shape, entry.state.factor_terms(), entry.state.divisor(), {}, 0, shape.rows});
  product->out = pool_->try_take(shape.payload_bytes);
  if (!product->out) return finish(entry, Buffer());
  entry.computing = true;
  if (wide_.loop != nullptr) {
    const std::size_t row_operations =
        std::size_t{shape.cols} * std::max<std::size_t>(1, entry.state.factor_count_sum());
    product->rows_at_once = std::max(kProductRows, kProductOperations / row_operations / kProductRows * kProductRows);
  }
  multiply_rows(product);
}

/// The next rows. The parts stay until the last ones are made: the entry is computing.
void Shard::multiply_rows(const std::shared_ptr<Product>& product) {
  Product& made = *product;
  const std::size_t end_row = std::min<std::size_t>(made.next_row + made.rows_at_once, made.shape.rows);
  kernel::factor_product(made.terms, made.out.data(), made.shape.dtype, made.shape.rows, made.shape.cols, made.next_row,
                         end_row, made.divisor, false);
  made.next_row = end_row;
  if (end_row < made.shape.rows)
    return wide_.loop->post([this, product, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired()) multiply_rows(product);
    });
  Entry& entry = entries_.at(made.key);
  entry.computing = false;
  finish(entry, std::move(made.out));
}

/// Many threads on one array, which has to be here as a whole first (Parameter Hub Figure 7).
void Shard::reduce_wide(Entry& entry) {
  const auto inputs = entry.state.dense_inputs();
  const wire::Header shape = entry.state.shape();
  const std::size_t element_bytes = dtype_bytes(shape.dtype);
  const std::size_t element_count = shape.payload_bytes / element_bytes;
  const auto part_count = static_cast<std::size_t>(wide_.executor->thread_count());
  const auto out = std::make_shared<Buffer>(pool_->try_take(shape.payload_bytes));
  if (!*out) return finish(entry, Buffer());
  const auto computed = std::make_shared<std::promise<void>>();
  entry.computing = true;
  entry.computed = computed->get_future();
  wide_.executor->run(
      part_count,
      [=](std::size_t part) {
        const std::size_t begin = element_count * part / part_count;
        const std::size_t end = element_count * (part + 1) / part_count;
        std::vector<const std::byte*> slices;
        slices.reserve(inputs.size());
        for (const std::byte* input : inputs) slices.push_back(input + begin * element_bytes);
        kernel::sum(slices, out->data() + begin * element_bytes, end - begin, shape.dtype, shape.divisor);
      },
      [this, key = key_of(shape), out, computed, loop = wide_.loop, alive = std::weak_ptr<bool>(alive_)] {
        loop->post([this, key, out, alive] {
          if (alive.expired()) return;
          Entry& done = entries_.at(key);
          done.computing = false;
          finish(done, std::move(*out));
        });
        computed->set_value();
      });
}

}  // namespace poseidon
