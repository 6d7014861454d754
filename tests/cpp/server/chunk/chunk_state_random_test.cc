// ChunkState in thousands of random steps. Whatever the order and the pieces of the arrivals are, the result has the
// bits of one pass over the parts in rank order, and each borrowed payload is released once, as early as possible.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "cpp/server/chunk/contributions.h"
#include "kernel/kernel.h"
#include "server/chunk/chunk_state.h"

namespace poseidon {
namespace {

using testing::absent_of;
using testing::Bytes;
using testing::dense_factors_of;
using testing::factors_of;
using testing::push_of;
using testing::RecordingRequester;
using testing::with_size;

using Random = std::mt19937;

std::size_t below(Random& random, std::size_t bound) { return std::size_t{random()} % bound; }

Bytes random_values(Random& random, DType dtype, std::size_t element_count) {
  if (dtype_is_floating(dtype)) return kernel::random_array(random, dtype, element_count);
  Bytes bytes(element_count * dtype_bytes(dtype));
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// The contribution of one rank, and how much of it has arrived.
struct Rank {
  wire::Contribution header;
  Bytes memory;  // the payload begins at `skew`: lent memory need not be aligned
  std::size_t skew = 0;
  bool lent = false;
  RecordingRequester worker;

  bool admitted = false;
  bool complete = false;
  std::span<std::byte> place;
  std::size_t received_bytes = 0;
  int released = 0;

  bool present() const { return !header.absent; }
  bool has_factors() const { return header.has_factors(); }
  std::span<const std::byte> payload() const { return std::span(memory).subspan(skew); }
};

/// One random step of one chunk.
class RandomStep {
 public:
  explicit RandomStep(std::uint32_t seed, std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>())
      : random_(seed), pool_(std::move(pool)) {
    constexpr std::array<DType, 7> dtypes{DType::float32, DType::float64, DType::float16, DType::bfloat16,
                                          DType::int32,   DType::int64,   DType::uint8};
    worker_count_ = static_cast<std::uint32_t>(1 + below(random_, 9));
    dtype_ = dtypes[below(random_, dtypes.size())];
    divisor_ = dtype_is_floating(dtype_) ? static_cast<std::uint32_t>(1 + below(random_, 9)) : 1;
    reduction_.aggregation = below(random_, 3) == 0 ? Aggregation::at_once : Aggregation::streaming;
    reduction_.order = below(random_, 2) == 0 ? ReduceOrder::rank : ReduceOrder::arrival;
    const bool matrix = dtype_is_floating(dtype_) && below(random_, 4) == 0;
    rows_ = matrix ? 1 + below(random_, 40) : 0;
    cols_ = matrix ? 1 + below(random_, 40) : 0;
    element_count_ = matrix ? rows_ * cols_ : below(random_, below(random_, 2) == 0 ? 40 : 5001);
    for (std::uint32_t rank = 0; rank < worker_count_; ++rank) add_rank(rank);
  }

  ChunkState state() const { return {worker_count_, reduction_, pool_}; }
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  Reduction reduction() const { return reduction_; }

  /// Makes something happen to a random rank that has not finished. Returns false when all have finished.
  bool advance(ChunkState& state) {
    std::vector<Rank*> open;
    for (Rank& rank : ranks_)
      if (!rank.complete) open.push_back(&rank);
    if (open.empty()) return false;
    advance(state, *open[below(random_, open.size())]);
    return true;
  }

  void check_loans(bool finished) {
    for (std::size_t position = 0; position < order_.size(); ++position) {
      const Rank& rank = ranks_[order_[position]];
      if (!rank.lent) continue;
      const bool early = reduction_.aggregation == Aggregation::streaming && is_added(position);
      ASSERT_EQ(rank.released, (finished || early) ? 1 : 0) << where() << ", rank " << order_[position];
    }
  }

  Bytes expected() {
    std::vector<const Rank*> present;
    for (const std::uint32_t rank : adding_order())
      if (ranks_[rank].present()) present.push_back(&ranks_[rank]);
    Bytes out(element_count_ * dtype_bytes(dtype_));
    if (std::ranges::none_of(present, [](const Rank* rank) { return rank->has_factors(); })) {
      std::vector<const std::byte*> inputs;
      for (const Rank* rank : present) inputs.push_back(rank->payload().data());
      kernel::sum(inputs, out.data(), element_count_, dtype_, divisor_);
      return out;
    }
    std::vector<kernel::FactorTerm> terms;
    for (const Rank* rank : present) terms.push_back(term_of(*rank));
    kernel::factor_product(terms, out.data(), dtype_, rows_, cols_, 0, rows_, divisor_, false);
    return out;
  }

  bool any_present() const {
    return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.present(); });
  }
  bool all_released_once() const {
    return std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.released == (rank.lent ? 1 : 0); });
  }

  /// Drops a random rank that has been admitted. Returns null if there is none.
  Rank* drop_one(ChunkState& state) {
    std::vector<Rank*> admitted;
    for (Rank& rank : ranks_)
      if (rank.admitted) admitted.push_back(&rank);
    if (admitted.empty()) return nullptr;
    Rank* gone = admitted[below(random_, admitted.size())];
    state.drop(&gone->worker);
    return gone;
  }

  /// A dropped rank starts again from the beginning.
  void begin_again(Rank& rank) {
    rank.admitted = rank.complete = false;
    rank.received_bytes = 0;
    rank.released = 0;
    std::erase(order_, rank.header.rank);
  }

  void expect_result(ChunkState& state) {
    ASSERT_TRUE(state.all_here()) << where();
    ASSERT_EQ(state.any_present(), any_present()) << where();
    if (any_present()) {
      ASSERT_EQ(state.shape().payload_bytes, element_count_ * dtype_bytes(dtype_));
      ASSERT_EQ(result_of(state), expected()) << where();
    }
    state.reset();
    check_loans(true);
    EXPECT_FALSE(state.started());
  }

  Bytes result_of(ChunkState& state) const {
    if (!state.is_product()) {
      const Buffer sum = state.take_sum();
      return {sum.span().begin(), sum.span().end()};
    }
    Bytes out(state.shape().payload_bytes);
    kernel::factor_product(state.factor_terms(), out.data(), dtype_, rows_, cols_, 0, rows_, state.divisor(), false);
    return out;
  }

  std::deque<Rank>& ranks() { return ranks_; }
  Random& random() { return random_; }

  std::string where() const {
    return std::to_string(worker_count_) + " workers, " + std::to_string(element_count_) + " " +
           std::string(dtype_name(dtype_)) + " / " + std::to_string(divisor_) +
           (reduction_.aggregation == Aggregation::streaming ? ", streaming" : ", at once") +
           (reduction_.order == ReduceOrder::rank ? ", rank order" : ", order of arrival");
  }

 private:
  void add_rank(std::uint32_t index) {
    Rank& rank = ranks_.emplace_back();
    wire::Contribution header = push_of(index, worker_count_, 3);
    header.dtype = dtype_;
    header.divisor = divisor_;
    const auto rows = static_cast<std::uint32_t>(rows_);
    const auto cols = static_cast<std::uint32_t>(cols_);
    if (below(random_, 5) == 0) {
      rank.header = absent_of(rows_ > 0 ? factors_of(header, rows, cols, 0) : header);
      return;
    }
    const auto count = static_cast<std::uint32_t>(below(random_, 5));
    rank.header = rows_ == 0               ? with_size(header, element_count_ * dtype_bytes(dtype_))
                  : below(random_, 2) == 0 ? factors_of(header, rows, cols, count)
                                           : dense_factors_of(header, rows, cols);
    rank.lent = rank.header.payload_bytes > 0 && below(random_, 2) == 0;
    rank.skew = rank.lent ? below(random_, 3) * dtype_bytes(dtype_) : 0;
    rank.memory = random_values(random_, dtype_, (rank.skew + rank.header.payload_bytes) / dtype_bytes(dtype_));
  }

  void advance(ChunkState& state, Rank& rank) {
    if (!rank.admitted) {
      ASSERT_TRUE(state.admit(rank.header, &rank.worker).ok()) << where();
      rank.admitted = true;
      order_.push_back(rank.header.rank);
      if (!rank.lent && rank.header.payload_bytes > 0) {
        rank.place = state.place(rank.header.rank, pool_->take(rank.header.payload_bytes));
        ASSERT_EQ(rank.place.size(), rank.header.payload_bytes);
        return;
      }
      rank.complete = true;
      std::function<void()> release;
      if (rank.lent) release = [&rank] { ++rank.released; };
      return state.complete(rank.header.rank, rank.payload(), std::move(release));
    }
    const std::size_t rest_bytes = rank.place.size() - rank.received_bytes;
    const std::size_t piece_bytes = below(random_, 3) == 0 ? rest_bytes : 1 + below(random_, rest_bytes);
    std::memcpy(rank.place.data() + rank.received_bytes, rank.payload().data() + rank.received_bytes, piece_bytes);
    rank.received_bytes += piece_bytes;
    if (rank.received_bytes < rank.place.size()) return state.progress(rank.header.rank, rank.received_bytes);
    rank.complete = true;
    state.complete(rank.header.rank, rank.place, nullptr);
  }

  std::vector<std::uint32_t> adding_order() const {
    std::vector<std::uint32_t> order = order_;
    if (reduction_.order == ReduceOrder::rank) std::ranges::sort(order);
    return order;
  }

  /// Whether the whole part of the rank at this place in the order of admission must be in the sum by now.
  bool is_added(std::size_t position) const {
    std::vector<std::uint32_t> order(worker_count_);
    if (reduction_.order == ReduceOrder::rank)
      std::iota(order.begin(), order.end(), 0u);
    else
      order = order_;
    const auto at = std::ranges::find(order, order_[position]);
    // No part before it may be missing or be factors. The first part is added together with the second one.
    std::size_t before = 0;
    for (auto it = order.begin(); it != at; ++it) {
      const Rank& rank = ranks_[*it];
      if (!rank.admitted || (rank.present() && (!rank.complete || rank.has_factors()))) return false;
      before += rank.present() ? 1 : 0;
    }
    if (!ranks_[*at].complete || ranks_[*at].has_factors()) return false;
    if (before > 0) return true;
    for (auto it = at + 1; it != order.end(); ++it) {
      const Rank& rank = ranks_[*it];
      if (!rank.admitted) return false;
      if (rank.present()) return rank.complete && !rank.has_factors();
    }
    return false;
  }

  kernel::FactorTerm term_of(const Rank& rank) const {
    kernel::FactorTerm term;
    term.dtype = dtype_;
    if (rank.has_factors()) {
      term.count = rank.header.factor_count;
      term.left = rank.payload().data();
      term.right = term.left + term.count * rows_ * dtype_bytes(dtype_);
    } else {
      term.dense = rank.payload().data();
    }
    return term;
  }

  Random random_;
  std::uint32_t worker_count_ = 0;
  DType dtype_ = DType::float32;
  std::uint32_t divisor_ = 1;
  Reduction reduction_;
  std::size_t rows_ = 0;
  std::size_t cols_ = 0;
  std::size_t element_count_ = 0;
  std::deque<Rank> ranks_;
  std::vector<std::uint32_t> order_;  // of admission
  const std::shared_ptr<BufferPool> pool_;
};

TEST(ChunkStateRandom, TheResultDoesNotDependOnWhatArrivesWhen) {
  for (std::uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomStep step(seed);
    ChunkState state = step.state();
    while (step.advance(state)) {
      step.check_loans(false);
      if (HasFatalFailure()) return;
    }
    step.expect_result(state);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(ChunkStateRandom, AStepThatLosesARankNeverEndsWrongAndLeavesNoLoan) {
  for (std::uint32_t seed = 10'000; seed < 13'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomStep step(seed);
    ChunkState state = step.state();
    for (std::size_t events = below(step.random(), 30); events > 0 && step.advance(state); --events) {
    }
    Rank* gone = step.drop_one(state);
    if (gone == nullptr) continue;
    EXPECT_EQ(gone->released, gone->lent && gone->admitted ? 1 : 0) << step.where();
    // The rank never comes back, and the others go on. Those that come after it has left may be refused.
    for (Rank& rank : step.ranks()) {
      if (rank.admitted || &rank == gone) continue;
      if (!state.admit(rank.header, &rank.worker).ok()) continue;
      rank.admitted = true;
      std::function<void()> release;
      if (rank.lent) release = [&rank] { ++rank.released; };
      state.complete(rank.header.rank, rank.payload(), std::move(release));
    }
    EXPECT_FALSE(state.all_here()) << step.where();
    for (Rank& rank : step.ranks())
      if (rank.admitted) state.drop(&rank.worker);
    for (const Rank& rank : step.ranks()) EXPECT_EQ(rank.released, rank.lent && rank.admitted ? 1 : 0) << step.where();
    EXPECT_FALSE(state.started());
    if (HasFailure()) return;

    RandomStep next(seed, step.pool());  // the same chunk serves a whole step afterwards
    while (next.advance(state)) {
    }
    next.expect_result(state);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(ChunkStateRandom, ARankThatComesBackIsRefusedOrAddedOnce) {
  int came_back = 0;
  for (std::uint32_t seed = 20'000; seed < 22'000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomStep step(seed);
    if (step.reduction().order == ReduceOrder::arrival) continue;  // then it is always refused
    ChunkState state = step.state();
    for (std::size_t events = below(step.random(), 30); events > 0 && step.advance(state); --events) {
    }
    if (state.all_here()) continue;
    Rank* gone = step.drop_one(state);
    if (gone == nullptr || !state.admit(gone->header, &gone->worker).ok()) continue;
    ++came_back;
    state.drop(&gone->worker);
    step.begin_again(*gone);
    while (step.advance(state)) {
    }
    step.expect_result(state);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
  EXPECT_GT(came_back, 100);
}

}  // namespace
}  // namespace poseidon
