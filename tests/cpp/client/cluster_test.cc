// Whole clusters in one process: random models, factor counts, orders and delays against a
// double-precision reference, bitwise equal over the ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cpp/client/random_model.h"
#include "poseidon/server.h"

namespace poseidon::testing {
namespace {

std::uint64_t hash_of(const Bytes& bytes) {
  std::uint64_t hash = 14695981039346656037u;
  for (const std::byte byte : bytes) hash = (hash ^ std::to_integer<unsigned>(byte)) * 1099511628211u;
  return hash;
}

/// Compares the values that must be equal on all ranks as they are reported.
class Agreement {
 public:
  void report(std::uint64_t step, std::size_t layer, const std::string& what, std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    const auto [entry, added] = values_.try_emplace({step, layer, what}, value);
    if (!added)
      EXPECT_EQ(entry->second, value) << "ranks disagree on the " << what << " of layer " << layer << ", step " << step;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<std::uint64_t, std::size_t, std::string>, std::uint64_t> values_;
};

/// One layer's exchange on one rank.
struct Running {
  Given given;
  Bytes data;
  Scheme scheme = Scheme::ps;
  bool accumulates = false;
  bool gathers = false;
  bool only_rows = false;
};

class Rank {
 public:
  Rank(const RandomJob& job, std::size_t rank, Agreement& agreement)
      : job_(job), rank_(rank), random_(job.seed * 31 + rank), agreement_(agreement) {}

  void run(const Options& options) {
    pause();
    auto connected = Client::connect(options, nullptr, always);
    ASSERT_TRUE(connected.ok()) << connected.status().message();
    client_ = std::move(connected.value());
    add_layers(0, job_.split);
    if (job_.split < job_.layers.size()) add_layers(job_.split, job_.layers.size());
    if (ids_.size() != job_.layers.size()) return;
    for (std::size_t i = 0; i < ids_.size(); ++i)
      if (job_.told_factor_count(i) > 0) client_->set_factor_count(ids_[i], job_.told_factor_count(i));
    running_.resize(ids_.size());
    for (std::uint64_t step = 1; step <= job_.step_count; ++step) run_step(step);
    pause();
    client_->shutdown();
  }

 private:
  void add_layers(std::size_t begin, std::size_t end) {
    const auto from = job_.layers.begin();
    auto added = client_->add_layers(
        {from + static_cast<std::ptrdiff_t>(begin), from + static_cast<std::ptrdiff_t>(end)}, job_.transient, always);
    ASSERT_TRUE(added.ok()) << added.status().message();
    for (std::size_t i = begin; i < end; ++i)
      ids_.push_back(added.value().first_layer + static_cast<std::uint32_t>(i - begin));
  }

  void run_step(std::uint64_t step) {
    const auto told = job_.told_priorities(step, rank_);
    expect_ok(client_->set_priorities(ids_[told.first_layer], told.priorities, told.threshold), step, 0);
    for (std::size_t index = 0; index < ids_.size(); ++index) choose(step, index);
    for (const std::size_t index : shuffled()) {
      start(step, index);
      pause();
    }
    // Either the rank waits for each layer and checks it while others are in flight, or it waits for all at once.
    if (random_() % 2 == 0) expect_ok(client_->wait_all(always), step, 0);
    for (const std::size_t index : shuffled()) {
      expect_ok(client_->wait(ids_[index], always), step, index);
      check(step, index);
    }
  }

  /// Chooses a scheme, or withdraws the last choice. Layers of groups, and those that name a scheme, refuse it.
  void choose(std::uint64_t step, std::size_t index) {
    const SchemeChoice choice = job_.choice(step, index);
    const Status status = client_->choose(ids_[index], choice);
    if (!status.ok()) EXPECT_EQ(status.code(), ErrorCode::invalid_argument) << where(step, index) << status.message();
    agreement_.report(step, index, "choice", static_cast<std::uint64_t>(status.ok()));
  }

  void start(std::uint64_t step, std::size_t index) {
    const Layer& layer = job_.layers[index];
    Running& running = running_[index];
    running = {};
    running.given = job_.given(step, index, rank_);
    running.scheme = client_->next_scheme(ids_[index]);
    agreement_.report(step, index, "scheme", static_cast<std::uint64_t>(running.scheme));
    const bool multiplies = traits_of(running.scheme).workers_multiply;
    const bool converts = multiplies || (traits_of(running.scheme).converts && layer.dtype == DType::float32);
    const bool takes_factors =
        traits_of(running.scheme).takes_factors && (converts || running.given.factor_dtype == layer.dtype);
    const std::uint32_t divisor = job_.divisor(step, layer);
    running.data = job_.before(step, index);
    if (running.given.kind == Given::Kind::absent)
      return expect_ok(client_->start_absent(ids_[index], running.data, divisor), step, index);
    if (running.given.kind == Given::Kind::rows && traits_of(running.scheme).takes_rows) return start_rows(step, index);
    if (running.given.kind != Given::Kind::factors || !takes_factors) {
      std::uint64_t factor_count = kNotFactorable;
      if (running.given.kind == Given::Kind::factors) factor_count = running.given.factor_count();
      if (layer.zeros_are_missing && running.given.kind == Given::Kind::rows)
        factor_count = running.given.row_indexes.size();
      running.data = dense_of(running.given, layer);
      return expect_ok(client_->start(ids_[index], running.data, divisor, factor_count), step, index);
    }
    running.gathers = multiplies && job_.only_gathers(step, index);
    running.accumulates = multiplies && !running.gathers && job_.accumulates(step, index);
    const auto destination = running.gathers ? std::span<std::byte>() : std::span<std::byte>(running.data);
    expect_ok(client_->start_factors(ids_[index], running.given.factor_dtype, running.given.segments(), destination,
                                     divisor, running.accumulates),
              step, index);
  }

  void start_rows(std::uint64_t step, std::size_t index) {
    Running& running = running_[index];
    running.only_rows = job_.only_gathers(step, index);
    const auto destination = running.only_rows ? std::span<std::byte>() : std::span<std::byte>(running.data);
    const LayerRows rows{.indexes = running.given.row_indexes, .values = running.given.row_values};
    expect_ok(client_->start_rows(ids_[index], rows, destination, job_.divisor(step, job_.layers[index])), step, index);
  }

  /// Returns a result that came as rows, with zeros for the others.
  Bytes result_of_rows(std::size_t index) const {
    const Layer& layer = job_.layers[index];
    const LayerRows rows = client_->result_rows(ids_[index]);
    if (rows.dense) return {rows.values.begin(), rows.values.end()};
    Bytes dense(layer.size_bytes());
    const std::size_t row_bytes = layer.cols * dtype_bytes(layer.dtype);
    EXPECT_EQ(rows.values.size(), rows.indexes.size() * row_bytes);
    for (std::size_t i = 0; i < rows.indexes.size(); ++i)
      std::memcpy(&dense[rows.indexes[i] * row_bytes], &rows.values[i * row_bytes], row_bytes);
    return dense;
  }

  void check(std::uint64_t step, std::size_t index) {
    const Layer& layer = job_.layers[index];
    Running& running = running_[index];
    if (running.only_rows) running.data = result_of_rows(index);
    std::vector<Given> all;
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(job_.world_size); ++rank)
      all.push_back(job_.given(step, index, rank));
    const bool present = std::ranges::any_of(all, [](const Given& given) { return given.kind != Given::Kind::absent; });
    const LayerStats stats = client_->layer_stats(ids_[index]);
    EXPECT_EQ(stats.scheme, running.scheme);
    if (layer.element_count > 0) EXPECT_EQ(stats.present, present) << where(step, index);
    EXPECT_GE(stats.completed_ns, stats.started_ns);
    if (running.gathers) return check_parts(step, index, all);
    if (!present) {
      EXPECT_EQ(running.data, job_.before(step, index)) << where(step, index) << " was touched";
      return;
    }
    agreement_.report(step, index, running.accumulates ? "accumulated bits" : "bits", hash_of(running.data));
    if (!RandomJob::is_lossy(running.scheme) && !keeps_rounding(layer)) check_values(step, index, all);
  }

  void check_values(std::uint64_t step, std::size_t index, const std::vector<Given>& all) {
    const Layer& layer = job_.layers[index];
    const Running& running = running_[index];
    Exact exact = zeros(layer);
    for (const Given& given : all) add_to(exact, given, layer);
    const Bytes before = job_.before(step, index);
    const double divisor = job_.divisor(step, layer);
    for (std::size_t i = 0; i < layer.element_count; ++i) {
      const double old = running.accumulates ? read_value(before, layer.dtype, i) : 0;
      const double expected = old + exact.values[i] / divisor;
      const double bound = 16 * epsilon_of(layer.dtype) * (std::fabs(old) + exact.magnitudes[i] / divisor + 1e-3) +
                           rounding_of(job_.wire_dtype(layer), exact, i) / divisor;
      const double got = read_value(running.data, layer.dtype, i);
      ASSERT_LE(std::fabs(got - expected), bound) << where(step, index) << " element " << i << ": " << got;
    }
  }

  void check_parts(std::uint64_t step, std::size_t index, const std::vector<Given>& all) {
    const Layer& layer = job_.layers[index];
    const auto parts = client_->gathered(ids_[index]);
    ASSERT_EQ(parts.size(), all.size());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const GatheredPart& part = parts[rank];
      ASSERT_EQ(part.dense != nullptr, all[rank].kind == Given::Kind::dense) << where(step, index);
      const auto [dense, lefts, rights] = arrays_of(part, layer);
      const std::string name = "part of rank " + std::to_string(rank);
      agreement_.report(step, index, name, hash_of(joined({dense, lefts, rights})));
      if (job_.wire_dtype(layer) != layer.dtype) continue;  // it is rounded
      EXPECT_EQ(dense, all[rank].dense) << where(step, index);
      EXPECT_EQ(lefts, joined(all[rank].lefts)) << where(step, index);
      EXPECT_EQ(rights, joined(all[rank].rights)) << where(step, index);
    }
  }

  /// What a gathered part holds, in the type in which it travelled: either `dense`, or factors of all segments.
  struct PartArrays {
    Bytes dense;
    Bytes lefts;
    Bytes rights;
  };

  static PartArrays arrays_of(const GatheredPart& part, const Layer& layer) {
    PartArrays arrays;
    if (part.dense != nullptr)
      arrays.dense.assign(part.dense, part.dense + array_bytes(part.dtype, layer.element_count));
    for (const FactorRows& rows : part.factors) {
      const std::size_t row_bytes = rows.count * dtype_bytes(part.dtype);
      arrays.lefts.insert(arrays.lefts.end(), rows.left, rows.left + row_bytes * layer.rows);
      arrays.rights.insert(arrays.rights.end(), rows.right, rows.right + row_bytes * layer.cols);
    }
    return arrays;
  }

  static Bytes joined(const std::vector<Bytes>& pieces) {
    Bytes all;
    for (const Bytes& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    return all;
  }

  std::vector<std::size_t> shuffled() {
    std::vector<std::size_t> order(ids_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random_);
    return order;
  }

  void pause() {
    for (auto turns = random_() % 4 == 0 ? random_() % 100 : 0; turns > 0; --turns) std::this_thread::yield();
  }

  std::string where(std::uint64_t step, std::size_t index) const {
    const Layer& layer = job_.layers[index];
    return "seed " + std::to_string(job_.seed) + ", rank " + std::to_string(rank_) + " of " +
           std::to_string(job_.world_size) + ", step " + std::to_string(step) + ", " + layer.name + " (" +
           std::to_string(layer.element_count) + " " + std::string(dtype_name(layer.dtype)) + ", " +
           std::string(scheme_name(running_[index].scheme)) + ")";
  }

  void expect_ok(const Status& status, std::uint64_t step, std::size_t index) const {
    EXPECT_TRUE(status.ok()) << where(step, index) << ": " << status.message();
  }

  const RandomJob& job_;
  const std::size_t rank_;
  Random random_;
  Agreement& agreement_;
  std::unique_ptr<Client> client_;
  std::vector<std::uint32_t> ids_;
  std::vector<Running> running_;
};

std::vector<std::unique_ptr<Server>> listen_servers(const RandomJob& job) {
  std::vector<std::unique_ptr<Server>> servers;
  Options options = job.shared;
  if (options.interfaces.empty()) options.interfaces = {"127.0.0.1"};
  for (int i = 0; i < job.server_count; ++i) {
    options.server_cores = (job.shared.server_cores + i) % 4;  // servers may differ
    servers.push_back(std::move(Server::listen(options, 0).value()));
  }
  return servers;
}

void run_job(const RandomJob& job, const std::vector<std::unique_ptr<Server>>& servers, const std::string& name) {
  Agreement agreement;
  auto all = cluster_options(job.world_size);
  run_ranks(job.world_size, [&](int rank) {
    Options options = job.options_of(all[static_cast<std::size_t>(rank)]);
    options.job = name;
    for (const auto& server : servers) options.servers.push_back(server->address());
    Rank(job, static_cast<std::size_t>(rank), agreement).run(options);
  });
}

class RandomJobs : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomJobs, GiveTheExactSumAndTheSameBitsOnAllRanks) {
  for (std::uint64_t seed = GetParam() * 15; seed < (GetParam() + 1) * 15; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomJob job(seed);
    run_job(job, listen_servers(job), "default");
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(RandomJob, DrawEveryScheme) {
  std::set<Scheme> drawn{Scheme::local};  // what a single worker takes
  for (std::uint64_t seed = 0; seed < 8 * 15; ++seed)
    for (const Layer& layer : RandomJob(seed).layers) drawn.insert(layer.scheme);
  for (const Scheme scheme : all_schemes()) EXPECT_TRUE(drawn.contains(scheme)) << scheme_name(scheme);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomJobs, ::testing::Range<std::uint64_t>(0, 8));

TEST(SharedServers, CarryTwoJobsAtOnce) {
  RandomJob one(1001);
  RandomJob two(1002);
  for (RandomJob* job : {&one, &two}) {
    job->server_count = 2;
    job->shared.transport = Medium::automatic;
    job->shared.assignment = Assignment::chunk;
    job->shared.interfaces.clear();
  }
  const auto servers = listen_servers(one);
  std::thread other([&] { run_job(one, servers, "one"); });
  run_job(two, servers, "two");
  other.join();
}

/// The medium, and how many loops move a worker's bytes.
class LargeTensors : public ::testing::TestWithParam<std::pair<Medium, int>> {};

TEST_P(LargeTensors, ArriveWholeUnderEveryScheme) {
  auto all = cluster_options(3);
  const auto [medium, worker_cores] = GetParam();
  for (auto& options : all) {
    options.transport = medium;
    options.worker_cores = worker_cores;
  }
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  const std::size_t rows = 1000;
  const std::size_t cols = 3000;
  const auto first = cluster.add({vector_layer("vector", 5'000'011), matrix_layer("sfb", rows, cols, Scheme::sfb),
                                  matrix_layer("project_adam", rows, cols, Scheme::project_adam),
                                  matrix_layer("sharded_factors", rows, cols, Scheme::sharded_factors)});
  cluster.each([&](std::size_t rank, Client& client) {
    const float mine = static_cast<float>(rank + 1);
    std::vector<float> dense(5'000'011, mine);
    std::vector<float> left(rows * 2, mine);
    std::vector<float> right(cols * 2, 2.0F);
    std::vector<float> product(rows * cols);
    std::vector<float> matrix(rows * cols, mine);
    std::vector<float> blocks(rows * cols);
    EXPECT_TRUE(client.start(first, bytes_of(dense), 2).ok());
    EXPECT_TRUE(client
                    .start_factors(first + 1, DType::float32, {{bytes_of(left).data(), bytes_of(right).data(), 2}},
                                   bytes_of(product), 1, false)
                    .ok());
    EXPECT_TRUE(client.start(first + 2, bytes_of(matrix), 1).ok());
    EXPECT_TRUE(client
                    .start_factors(first + 3, DType::float32, {{bytes_of(left).data(), bytes_of(right).data(), 2}},
                                   bytes_of(blocks), 1, false)
                    .ok());
    EXPECT_TRUE(client.wait_all(always).ok());
    EXPECT_EQ(dense, std::vector<float>(5'000'011, 3.0F));
    EXPECT_EQ(product, std::vector<float>(rows * cols, 24.0F));
    EXPECT_EQ(matrix, std::vector<float>(rows * cols, 6.0F));
    EXPECT_EQ(blocks, product);
    if (GetParam().first == Medium::tcp)
      EXPECT_GT(client.traffic().bytes_sent, rows * cols * sizeof(float));
    else
      EXPECT_EQ(client.traffic().bytes_sent, 0u) << "nothing crosses a network";
  });
}

INSTANTIATE_TEST_SUITE_P(Media, LargeTensors,
                         ::testing::Values(std::pair(Medium::tcp, 0), std::pair(Medium::automatic, 0),
                                           std::pair(Medium::tcp, 3)));

TEST(NextScheme, FollowsTheFactorCountOfTheStepBefore) {
  auto all = cluster_options(4);
  for (auto& options : all) options.small_bytes = 0;  // small layers would stay with ps
  TestCluster cluster(all);
  ASSERT_TRUE(cluster.connected());
  constexpr std::size_t kSize = 64;  // sfb pays up to K = kSize / 4 on four workers
  const auto layer = cluster.add({matrix_layer("matrix", kSize, kSize)});
  const std::vector<std::uint64_t> counts{4, 40, 16, kNotFactorable, 4, 0, 4};
  const std::vector<Scheme> expected{Scheme::ps, Scheme::sfb, Scheme::ps, Scheme::sfb,
                                     Scheme::ps, Scheme::sfb, Scheme::ps};
  cluster.each([&](std::size_t rank, Client& client) {
    for (std::size_t step = 0; step < counts.size(); ++step) {
      EXPECT_EQ(client.next_scheme(layer), expected[step]) << "step " << step;
      std::vector<float> gradient(kSize * kSize, 1.0F);
      // The ranks' counts differ, and their mean decides.
      std::uint64_t count = counts[step];
      if (count != kNotFactorable && count > 0) count = rank % 2 == 0 ? count - 2 : count + 2;
      ASSERT_TRUE(client.start(layer, bytes_of(gradient), 1, count).ok());
      ASSERT_TRUE(client.wait_all(always).ok());
      EXPECT_EQ(gradient[7], 4.0F);
    }
  });
}

}  // namespace
}  // namespace poseidon::testing
