// rows: the bits of its results, the bytes of its messages, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "cpp/client/cluster.h"
#include "poseidon/plan.h"
#include "scheme/peer_broadcast.h"
#include "wire/header.h"

namespace poseidon::testing {
namespace {

using Floats = std::vector<float>;
using Indexes = std::vector<std::uint32_t>;

constexpr std::size_t kTableRows = 50;
constexpr std::size_t kTableCols = 6;
constexpr std::size_t kTableWorkers = 3;
constexpr std::uint32_t kDivisor = 3;

Layer table(std::size_t rows = kTableRows, std::size_t cols = kTableCols, Scheme scheme = Scheme::automatic) {
  Layer layer = matrix_layer("table", rows, cols, scheme);
  layer.row_gradient = true;
  return layer;
}

/// What one rank contributes: rows, a dense gradient, or nothing.
struct Gradient {
  bool absent = false;
  Indexes indexes;
  Floats values;
  Floats dense;

  LayerRows rows() const { return {.indexes = indexes, .values = std::as_bytes(std::span(values))}; }
};

/// What a rank got. A dense one has no indexes.
struct Mean {
  bool dense = false;
  Indexes indexes;
  Floats values;

  bool operator==(const Mean&) const = default;
};

Floats uniform_floats(std::mt19937& random, std::size_t count) {
  std::uniform_real_distribution<float> values(-1, 1);
  Floats floats(count);
  for (float& value : floats) value = values(random);
  return floats;
}

/// Some rows, of which the ranks share many.
Gradient random_rows(std::mt19937& random, std::size_t most, std::size_t rows = kTableRows,
                     std::size_t cols = kTableCols) {
  std::set<std::uint32_t> indexes;
  for (std::size_t i = 0; i < most; ++i) indexes.insert(static_cast<std::uint32_t>(random() % rows));
  return {false, {indexes.begin(), indexes.end()}, uniform_floats(random, indexes.size() * cols), {}};
}

Gradient absent() { return {true, {}, {}, {}}; }

/// The mean of each row, added in rank order in float32 and divided once.
Mean mean_in_rank_order(const std::vector<Gradient>& gradients) {
  Mean mean;
  std::map<std::uint32_t, Floats> sums;
  for (const Gradient& one : gradients) {
    mean.dense = mean.dense || !one.dense.empty();
    const std::size_t count = one.dense.empty() ? one.indexes.size() : kTableRows;
    for (std::size_t i = 0; i < count; ++i) {
      const auto row = one.dense.empty() ? one.indexes[i] : static_cast<std::uint32_t>(i);
      Floats& sum = sums.try_emplace(row, kTableCols).first->second;
      const Floats& values = one.dense.empty() ? one.values : one.dense;
      for (std::size_t col = 0; col < kTableCols; ++col) sum[col] += values[i * kTableCols + col];
    }
  }
  for (const auto& [row, sum] : sums) {
    if (!mean.dense) mean.indexes.push_back(row);
    for (const float value : sum) mean.values.push_back(value / kDivisor);
  }
  return mean;
}

Mean result_of(const Client& client, std::uint32_t layer) {
  const LayerRows rows = client.result_rows(layer);
  Mean mean{rows.dense, {rows.indexes.begin(), rows.indexes.end()}, Floats(rows.values.size() / sizeof(float))};
  if (!rows.values.empty()) std::memcpy(mean.values.data(), rows.values.data(), rows.values.size());
  return mean;
}

/// Shared memory would not count as network traffic.
std::vector<Options> over_tcp() {
  auto options = cluster_options(kTableWorkers);
  for (Options& one : options) one.transport = Medium::tcp;
  return options;
}

class RowsTest : public ::testing::Test {
 protected:
  /// One step. Returns what each rank got. A dense gradient's result is in its own memory.
  std::vector<Mean> exchange(const std::vector<Gradient>& gradients) {
    std::vector<Mean> results(kTableWorkers);
    cluster_.each([&](std::size_t rank, Client& client) {
      EXPECT_EQ(client.next_scheme(layer_), Scheme::rows);
      const Gradient& own = gradients[rank];
      Floats memory = own.dense;
      Status status = own.absent          ? client.start_absent(layer_, {}, kDivisor)
                      : own.dense.empty() ? client.start_rows(layer_, own.rows(), {}, kDivisor)
                                          : client.start(layer_, bytes_of(memory), kDivisor);
      ASSERT_TRUE(status.ok()) << status.message();
      status = client.wait(layer_, always);
      EXPECT_TRUE(status.ok()) << status.message();
      results[rank] = own.dense.empty() ? result_of(client, layer_) : Mean{true, {}, memory};
    });
    return results;
  }

  void expect_mean(const std::vector<Gradient>& gradients) {
    const Mean mean = mean_in_rank_order(gradients);
    for (const Mean& result : exchange(gradients)) EXPECT_EQ(result, mean);
  }

  Gradient random_dense() { return {false, {}, {}, uniform_floats(random_, kTableRows * kTableCols)}; }

  TestCluster cluster_{over_tcp()};
  std::uint32_t layer_ = cluster_.add({table()});
  std::mt19937 random_{1};
};

TEST_F(RowsTest, EachRowHasTheBitsOfTheSumInRankOrder) {
  for (int step = 0; step < 20; ++step)
    expect_mean({random_rows(random_, 1), random_rows(random_, 30), random_rows(random_, random_() % 20)});
}

TEST_F(RowsTest, ARankMayContributeNoRowsADenseGradientOrNothing) {
  expect_mean({random_rows(random_, 0), random_rows(random_, 5), absent()});
  expect_mean({random_rows(random_, 5), random_dense(), absent()});
  expect_mean({random_dense(), random_dense(), random_rows(random_, 9)});
  expect_mean({random_rows(random_, 0), absent(), absent()});
  EXPECT_TRUE(cluster_.clients[0]->layer_stats(layer_).present);
  expect_mean({absent(), absent(), absent()});
  EXPECT_FALSE(cluster_.clients[0]->layer_stats(layer_).present);
}

TEST_F(RowsTest, ADestinationGetsZerosForTheRowsThatNobodyHas) {
  const std::vector<Gradient> gradients{random_rows(random_, 4), random_rows(random_, 9), absent()};
  const Mean mean = mean_in_rank_order(gradients);
  Floats expected(kTableRows * kTableCols, 0);
  for (std::size_t i = 0; i < mean.indexes.size(); ++i)
    std::copy_n(mean.values.begin() + static_cast<std::ptrdiff_t>(i * kTableCols), kTableCols,
                expected.begin() + static_cast<std::ptrdiff_t>(mean.indexes[i] * kTableCols));
  cluster_.each([&](std::size_t rank, Client& client) {
    Floats memory(kTableRows * kTableCols, 7);
    const Gradient& own = gradients[rank];
    ASSERT_TRUE((own.absent ? client.start_absent(layer_, bytes_of(memory), kDivisor)
                            : client.start_rows(layer_, own.rows(), bytes_of(memory), kDivisor))
                    .ok());
    ASSERT_TRUE(client.wait(layer_, always).ok());
    EXPECT_EQ(memory, expected);
    EXPECT_TRUE(client.result_rows(layer_).values.empty());
  });
}

TEST_F(RowsTest, TheBytesAreThoseOfTheClosedFormAndOfTheRowsAlone) {
  constexpr std::size_t rows = 100'000;
  constexpr std::size_t cols = 16;
  constexpr std::size_t row_count = 64;
  const std::uint32_t large = cluster_.add({table(rows, cols)});
  const Cluster cluster{kTableWorkers, kTableWorkers, Placement::colocated};
  cluster_.each([&](std::size_t rank, Client& client) {
    Indexes indexes;
    for (std::uint32_t i = 0; i < row_count; ++i) indexes.push_back(i * 1000 + static_cast<std::uint32_t>(rank % 2));
    const Floats values(row_count * cols, static_cast<float>(rank));
    const LayerRows given{.indexes = indexes, .values = std::as_bytes(std::span(values))};
    ASSERT_TRUE(client.start_rows(large, given, {}, kDivisor).ok());
    ASSERT_TRUE(client.wait(large, always).ok());
    const LayerStats stats = client.layer_stats(large);
    const auto numbers =
        static_cast<std::uint64_t>(traits_of(Scheme::rows).cost(rows, cols, row_count, cluster).busiest(cluster));
    constexpr std::uint64_t headers = 2 * (kTableWorkers - 1) * wire::kHeaderBytes;
    EXPECT_EQ(stats.bytes_sent + stats.bytes_received, numbers * sizeof(float) + headers);
    const double dense = traits_of(Scheme::ps).cost(rows, cols, 0, cluster).busiest(cluster) * sizeof(float);
    EXPECT_LT(static_cast<double>(stats.bytes_sent + stats.bytes_received), 0.01 * dense);
    EXPECT_EQ(stats.factor_count, kTableWorkers * row_count);
    EXPECT_EQ(client.result_rows(large).indexes.size(), 2 * row_count);
  });
}

TEST_F(RowsTest, RefusesRowsThatTheLayerDoesNotHave) {
  Client& client = *cluster_.clients[0];
  const auto refused = [&](const Indexes& indexes, std::size_t value_count) {
    const Floats values(value_count);
    const Status status =
        client.start_rows(layer_, {.indexes = indexes, .values = std::as_bytes(std::span(values))}, {}, kDivisor);
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    return status;
  };
  EXPECT_TRUE(contains(refused({kTableRows}, kTableCols), "no row 50"));
  EXPECT_TRUE(contains(refused({2, 2}, 2 * kTableCols), "ascending"));
  EXPECT_TRUE(contains(refused({2, 3}, kTableCols), "elements for each row's index"));
  Floats memory(kTableRows * kTableCols);
  const Status factors = client.start_factors(layer_, DType::float32, {}, bytes_of(memory), kDivisor, false);
  EXPECT_EQ(factors.code(), ErrorCode::invalid_argument);
}

TEST(RowsPlan, TakesRowsUnlessAnotherSchemeIsNamedOrLateRanksAreDropped) {
  const Cluster cluster{4, 4, Placement::colocated};
  const auto scheme_of = [&](const Layer& layer, const Options& options) {
    const auto plan = make_plan({layer}, cluster, options, 0);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    return plan.ok() ? plan.value().layers[0].scheme : Scheme::automatic;
  };
  EXPECT_EQ(scheme_of(table(), {}), Scheme::rows);
  EXPECT_EQ(scheme_of(table(kTableRows, kTableCols, Scheme::rows), {}), Scheme::rows);
  EXPECT_EQ(scheme_of(table(kTableRows, kTableCols, Scheme::ps), {}), Scheme::ps);
  EXPECT_EQ(scheme_of(matrix_layer("no table", kTableRows, kTableCols, Scheme::rows), {}), Scheme::ps);
  Options drop;
  drop.stragglers = Stragglers::drop;
  EXPECT_EQ(scheme_of(table(), drop), Scheme::ps);
  Layer flat = vector_layer("flat", 300);
  flat.row_gradient = true;
  EXPECT_FALSE(make_plan({flat}, cluster, {}, 0).ok());
}

TEST(RowsWire, NarrowRowsAreAddedInFloat32) {
  TestCluster cluster(over_tcp());
  Layer layer = table();
  layer.wire = WireFormat::bf16;
  const std::uint32_t id = cluster.add({layer});
  cluster.each([&](std::size_t rank, Client& client) {
    const Indexes indexes{7};
    const Floats values(kTableCols, rank == 0 ? 1 + 1.0f / 512 : 1 + 1.0f / 128);  // 1/512 is lost on the way
    ASSERT_TRUE(client.start_rows(id, {.indexes = indexes, .values = std::as_bytes(std::span(values))}, {}, 2).ok());
    ASSERT_TRUE(client.wait(id, always).ok());
    EXPECT_EQ(result_of(client, id), (Mean{false, {7}, Floats(kTableCols, 1.5f + 1.0f / 128)}));
    EXPECT_LT(client.layer_stats(id).bytes_sent, 2 * (wire::kHeaderBytes + 8 + kTableCols * sizeof(float)));
  });
}

/// What a peer may send, without a network.
class RowsFromPeer : public ::testing::Test {
 protected:
  RowsFromPeer() {
    unit_.name = "table";
    unit_.size_bytes = kTableRows * kTableCols * sizeof(float);
    exchange_.about.unit = &unit_;
    exchange_.about.rows = kTableRows;
    exchange_.about.cols = kTableCols;
    exchange_.about.row_gradient = true;
    links_.worker_count = 3;
    links_.pool = std::make_shared<BufferPool>();
  }

  static wire::Contribution rows(std::uint32_t row_count) {
    wire::Contribution rows;
    rows.kind = wire::Kind::rows;
    rows.rank = 1;
    rows.rows = kTableRows;
    rows.cols = kTableCols;
    rows.factor_count = row_count;
    rows.payload_bytes = (row_count + row_count % 2) * 4 + row_count * kTableCols * sizeof(float);
    return rows;
  }

  Status accept(const wire::Contribution& message) {
    return scheme().make_room(inbox_, exchange_, message.make(), links_).status();
  }
  static const PeerBroadcast& scheme() { return peer_broadcast_of(wire::Kind::rows); }

  Unit unit_;
  Exchange exchange_;
  PeerInbox inbox_;
  Links links_;
};

TEST_F(RowsFromPeer, AreRefusedIfTheHeaderDoesNotFit) {
  wire::Contribution wrong = rows(3);
  wrong.kind = wire::Kind::factors;
  EXPECT_TRUE(contains(accept(wrong), "came as factors"));
  wrong = rows(3);
  wrong.rows = kTableRows + 1;
  EXPECT_TRUE(contains(accept(wrong), "shape"));
  wrong = rows(3);
  wrong.payload_bytes -= 4;
  EXPECT_TRUE(contains(accept(wrong), "size"));
  wrong = rows(3);
  wrong.dtype = DType::int32;
  EXPECT_TRUE(contains(accept(wrong), "dtype"));
  EXPECT_TRUE(contains(accept(rows(kTableRows + 1)), "size")) << "more rows than the layer has";
  EXPECT_TRUE(accept(rows(3)).ok());
  EXPECT_TRUE(contains(accept(rows(3)), "twice"));
}

TEST_F(RowsFromPeer, AreRefusedBeforeUseIfAnIndexDoesNotFit) {
  const wire::Contribution two = rows(2);
  std::vector<std::uint32_t> payload(two.payload_bytes / 4);
  payload[1] = kTableRows;
  ASSERT_TRUE(accept(two).ok());
  const Status status = scheme().store(inbox_, exchange_, two.make(), std::as_bytes(std::span(payload)), links_);
  EXPECT_EQ(status.code(), ErrorCode::mismatch);
  EXPECT_TRUE(contains(status, "no row 50")) << status.message();
}

}  // namespace
}  // namespace poseidon::testing
