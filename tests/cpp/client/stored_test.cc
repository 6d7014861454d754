// Stored layers, end to end: random jobs of push, pull, push_pull, assign and set_rule. Their bits are compared with
// parameters that are updated as whole arrays in this process.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cpp/client/random_model.h"
#include "cpp/server/chunk/reference_update.h"
#include "kernel/aggregators/aggregate.h"
#include "kernel/kernel.h"
#include "poseidon/server.h"

namespace poseidon::testing {
namespace {

/// A layer with its rule and its first value.
struct StoredLayer {
  Layer layer;
  UpdateRule rule;
  Bytes initial;
};

/// Every method gives the same answer on every rank.
class StoredJob {
 public:
  explicit StoredJob(std::uint64_t of) : seed(of), model(of) {
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    model.world_size = 1 + static_cast<int>(random() % 5);
    model.server_count = random() % 3 == 0 ? 1 + static_cast<int>(random() % 2) : 0;
    model.choose_modes();
    model.shared.assignment = Assignment::chunk;  // the other one keeps no values
    const bool medians = model.shared.reduce_order == ReduceOrder::rank && seed % 3 == 0;
    const auto rules = update_rules();
    for (std::size_t i = 0; i < 4; ++i) {
      StoredLayer& stored = layers.emplace_back();
      const DType dtype = random() % 3 == 0 ? DType::float64 : DType::float32;
      stored.layer = vector_layer("layer " + std::to_string(i), 1 + random() % 30'000, dtype);
      stored.layer.stored = true;
      stored.rule = i == 0 ? UpdateRule() : rules[random() % rules.size()];
      if (medians && random() % 3 == 0) stored.rule.aggregator = "median";
      stored.layer.whole = stored.rule.kind != nullptr && stored.rule.kind->whole_layer;
      stored.initial = random_reals(random, dtype, stored.layer.element_count);
      if (stored.rule.aggregator != kSumAggregator) model.shared.reduce_by_host = false;
    }
  }

  /// Returns numbers whose sums need rounding if the order is fixed, and are exact if it is not.
  Bytes gradient(std::uint64_t step, std::size_t layer, int rank) const {
    std::seed_seq sequence{seed, step, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(rank)};
    std::mt19937 random(sequence);
    const Layer& about = layers[layer].layer;
    if (model.shared.reduce_order == ReduceOrder::rank) return random_reals(random, about.dtype, about.element_count);
    std::vector<double> wide(about.element_count);
    for (double& value : wide) value = static_cast<double>(random() % 1000) / 8;
    return about.dtype == DType::float64 ? testing::bytes_of(wide)
                                         : testing::bytes_of(Floats(wide.begin(), wide.end()));
  }

  /// What the layer's aggregator makes of all gradients.
  Bytes mean_gradient(std::uint64_t step, std::size_t layer) const {
    std::vector<Bytes> all;
    for (int rank = 0; rank < model.world_size; ++rank) all.push_back(gradient(step, layer, rank));
    const Layer& about = layers[layer].layer;
    Bytes mean(about.size_bytes());
    if (const Aggregator* aggregator = find_aggregator(layers[layer].rule.aggregator); aggregator != nullptr)
      kernel::aggregate(*aggregator, pointers_to(all), mean.data(), about.element_count, about.dtype, 1);
    else
      kernel::sum(pointers_to(sums_of_hosts(all, about)), mean.data(), about.element_count, about.dtype, divisor());
    return mean;
  }

  static std::vector<const std::byte*> pointers_to(const std::vector<Bytes>& arrays) {
    std::vector<const std::byte*> pointers;
    for (const Bytes& one : arrays) pointers.push_back(one.data());
    return pointers;
  }

  /// What the servers add: the sums of racks, which are those of their machines, or all ranks' arrays.
  std::vector<Bytes> sums_of_hosts(const std::vector<Bytes>& all, const Layer& layer) const {
    const auto [hosts, racks] = model.hosts();
    if (hosts.empty()) return all;
    const auto machines = sums_by(hosts, all, layer);
    if (racks.empty()) return machines;
    std::vector<std::uint32_t> rack_of(machines.size());
    for (std::size_t rank = 0; rank < all.size(); ++rank) rack_of[hosts[rank]] = racks[rank];
    return sums_by(rack_of, machines, layer);
  }

  /// The sums of the arrays that have the same number.
  static std::vector<Bytes> sums_by(const std::vector<std::uint32_t>& numbers, const std::vector<Bytes>& all,
                                    const Layer& layer) {
    std::vector<std::vector<Bytes>> parts(*std::ranges::max_element(numbers) + 1);
    for (std::size_t index = 0; index < all.size(); ++index) parts[numbers[index]].push_back(all[index]);
    std::vector<Bytes> sums;
    for (const auto& part : parts) {
      Bytes& sum = sums.emplace_back(layer.size_bytes());
      kernel::sum(pointers_to(part), sum.data(), layer.element_count, layer.dtype, 1);
    }
    return sums;
  }

  std::uint32_t divisor() const { return static_cast<std::uint32_t>(model.world_size); }

  std::uint64_t seed;
  RandomJob model;
  std::vector<StoredLayer> layers;
};

class StoredRank {
 public:
  StoredRank(const StoredJob& job, int rank)
      : job_(job), rank_(rank), random_(static_cast<std::uint32_t>(job.seed * 31 + static_cast<std::uint64_t>(rank))) {}

  void run(const Options& options) {
    auto connected = Client::connect(options, nullptr, always);
    ASSERT_TRUE(connected.ok()) << connected.status().message();
    client_ = std::move(connected.value());
    std::vector<Layer> layers;
    for (const StoredLayer& stored : job_.layers) {
      layers.push_back(stored.layer);
      references_.emplace_back(stored.initial, stored.layer.dtype);
    }
    layers.push_back(vector_layer("barrier", 1));
    auto added = client_->add_layers(layers, false, always);
    ASSERT_TRUE(added.ok()) << added.status().message();
    first_ = added.value().first_layer;
    begin();
    for (std::uint64_t step = 1; step <= 4 && !::testing::Test::HasFailure(); ++step) {
      if (step == 3) restore();
      run_step(step);
    }
    await_others();  // a rank's server goes with it
    client_->shutdown();
  }

 private:
  /// Waits until all ranks have come here.
  void await_others() {
    Bytes one(sizeof(float));
    expect_ok(client_->start(id(job_.layers.size()), one, 1, kNotFactorable));
    expect_ok(client_->wait_all(always));
  }

  /// Whatever the priorities are, the operations of a rank take effect in the order of its calls.
  void change_priorities() {
    if (random_() % 2 == 0) return;
    std::vector<LayerPriority> priorities;
    const auto classes = static_cast<unsigned>(job_.model.shared.priority_classes);
    for (std::size_t i = 0; i < job_.layers.size(); ++i)
      priorities.push_back({static_cast<double>(random_() % 100) / 100, static_cast<int>(random_() % classes)});
    expect_ok(client_->set_priorities(first_, priorities, 0.5));
  }

  std::uint32_t id(std::size_t layer) const { return first_ + static_cast<std::uint32_t>(layer); }

  void expect_ok(const Status& status) {
    EXPECT_TRUE(status.ok()) << "seed " << job_.seed << ", rank " << rank_ << ": " << status.message();
  }

  /// Rank 0 assigns the values, all ranks pull them, and all set the rules.
  void begin() {
    change_priorities();
    for (std::size_t i = 0; i < job_.layers.size(); ++i)
      if (rank_ == 0) expect_ok(client_->assign(id(i), job_.layers[i].initial));
    expect_ok(client_->wait_all(always));
    change_priorities();
    for (std::size_t i = 0; i < job_.layers.size(); ++i) expect_array(i, 0, job_.layers[i].initial);
    for (std::size_t i = 0; i < job_.layers.size(); ++i) expect_ok(client_->set_rule(id(i), job_.layers[i].rule));
  }

  void run_step(std::uint64_t step) {
    change_priorities();
    const std::size_t count = job_.layers.size();
    std::vector<Bytes> gradients(count);
    std::vector<Bytes> results(count);
    for (std::size_t i = count; i-- > 0;) {
      gradients[i] = job_.gradient(step, i, rank_);
      results[i] = base(i, gradients[i].size());
      const auto choice = random_() % 3;
      if (choice == 0) {
        results[i].clear();
        expect_ok(client_->push(id(i), gradients[i], job_.divisor()));
      } else if (choice == 1) {
        expect_ok(client_->push_pull(id(i), gradients[i], results[i], job_.divisor()));
      } else {  // in place
        results[i] = gradients[i];
        expect_ok(client_->start(id(i), results[i], job_.divisor(), kNotFactorable));
      }
    }
    expect_ok(client_->wait_all(always));
    for (std::size_t i = 0; i < count; ++i) {
      advance_reference(step, i);
      EXPECT_EQ(gradients[i], job_.gradient(step, i, rank_)) << "a push changed what it sent";
      if (!results[i].empty()) EXPECT_TRUE(results[i] == references_[i].value) << where(step, i);
      check_arrays(step, i);
    }
  }

  /// What lies where a result goes: the value, of which then the difference may come, another one, or something else.
  Bytes base(std::size_t layer, std::size_t size_bytes) {
    Bytes values = random_() % 3 == 0 ? Bytes(size_bytes) : references_[layer].value;
    if (random_() % 3 == 0) values[random_() % values.size()] ^= std::byte{1};
    return values;
  }

  void advance_reference(std::uint64_t step, std::size_t layer) {
    const Bytes mean = job_.mean_gradient(step, layer);
    if (job_.layers[layer].rule.kind == nullptr)
      references_[layer].value = mean;
    else
      references_[layer].update(job_.layers[layer].rule, mean);
  }

  /// The values cannot change now, because the next step needs this rank.
  void check_arrays(std::uint64_t step, std::size_t layer) {
    const ReferenceParameters& reference = references_[layer];
    EXPECT_TRUE(pulled(layer, 0) == reference.value) << where(step, layer);
    EXPECT_EQ(client_->layer_stats(id(layer)).update_count, reference.update_count) << where(step, layer);
    for (std::size_t state = 0; state < reference.states.size(); ++state)
      EXPECT_TRUE(pulled(layer, static_cast<std::uint32_t>(state + 1)) == reference.states[state])
          << where(step, layer);
  }

  Bytes pulled(std::size_t layer, std::uint32_t array) {
    change_priorities();
    Bytes values(job_.layers[layer].layer.size_bytes());
    expect_ok(client_->pull(id(layer), values, array));
    expect_ok(client_->wait(id(layer), always));
    return values;
  }
  void expect_array(std::size_t layer, std::uint32_t array, const Bytes& expected) {
    EXPECT_TRUE(pulled(layer, array) == expected) << where(0, layer) << ", array " << array;
  }

  /// Rank 0 assigns all values and states as they are, like after a checkpoint.
  void restore() {
    await_others();
    if (rank_ != 0) return;
    for (std::size_t i = 0; i < job_.layers.size(); ++i) {
      const ReferenceParameters& reference = references_[i];
      expect_ok(client_->assign(id(i), reference.value, 0, reference.update_count));
      expect_ok(client_->wait(id(i), always));
      for (std::size_t state = 0; state < reference.states.size(); ++state) {
        change_priorities();
        expect_ok(client_->assign(id(i), reference.states[state], static_cast<std::uint32_t>(state + 1),
                                  reference.update_count));
        expect_ok(client_->wait(id(i), always));
      }
    }
  }

  std::string where(std::uint64_t step, std::size_t layer) const {
    const StoredLayer& about = job_.layers[layer];
    return "seed " + std::to_string(job_.seed) + ", rank " + std::to_string(rank_) + " of " +
           std::to_string(job_.model.world_size) + ", step " + std::to_string(step) + ", " + about.layer.name + " (" +
           std::to_string(about.layer.element_count) + " " + std::string(dtype_name(about.layer.dtype)) + ", rule " +
           (about.rule.kind == nullptr ? "none" : about.rule.kind->name) + ", " + about.rule.aggregator + ")";
  }

  const StoredJob& job_;
  const int rank_;
  std::mt19937 random_;
  std::unique_ptr<Client> client_;
  std::uint32_t first_ = 0;
  std::vector<ReferenceParameters> references_;
};

class StoredJobs : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(StoredJobs, GiveTheBitsOfUpdatingWholeArrays) {
  for (std::uint64_t seed = GetParam() * 6; seed < (GetParam() + 1) * 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const StoredJob job(seed);
    std::vector<std::unique_ptr<Server>> servers;
    for (int i = 0; i < job.model.server_count; ++i) {
      Options options = job.model.shared;
      if (options.interfaces.empty()) options.interfaces = {"127.0.0.1"};
      servers.push_back(std::move(Server::listen(options, 0).value()));
    }
    const auto all = cluster_options(job.model.world_size);
    run_ranks(job.model.world_size, [&](int rank) {
      Options options = job.model.options_of(all[static_cast<std::size_t>(rank)]);
      for (const auto& server : servers) options.servers.push_back(server->address());
      StoredRank(job, rank).run(options);
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, StoredJobs, ::testing::Range<std::uint64_t>(0, 8));

}  // namespace
}  // namespace poseidon::testing
