// Random jobs for the cluster test: what every rank contributes in every step, which is the same on every rank, and
// what the result must be, in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpp/client/cluster.h"
#include "cpp/kernel/arrays.h"
#include "plan/hosts.h"

namespace poseidon::testing {

using kernel::Bytes;
using Random = std::mt19937_64;

inline double read_value(const Bytes& array, DType dtype, std::size_t index) {
  if (dtype == DType::uint8) return static_cast<double>(std::to_integer<int>(array[index]));
  if (dtype == DType::int32) return kernel::element<std::int32_t>(array.data(), index);
  if (dtype == DType::int64) return static_cast<double>(kernel::element<std::int64_t>(array.data(), index));
  return kernel::value_at(array.data(), dtype, index);
}

inline void write_value(Bytes& array, DType dtype, std::size_t index, double value) {
  const auto store = [&](auto typed) { std::memcpy(array.data() + index * sizeof typed, &typed, sizeof typed); };
  if (dtype == DType::uint8) return store(static_cast<std::uint8_t>(value));
  if (dtype == DType::int32) return store(static_cast<std::int32_t>(value));
  if (dtype == DType::int64) return store(static_cast<std::int64_t>(value));
  kernel::put(array.data(), dtype, index, value);
}

/// Returns floats in (-1, 1) whose sums need rounding, or integers that are small enough that uint8 sums do not wrap.
inline Bytes random_array(DType dtype, std::size_t element_count, Random& random) {
  Bytes array(element_count * dtype_bytes(dtype));
  std::uniform_real_distribution<double> real(-1, 1);
  for (std::size_t i = 0; i < element_count; ++i)
    write_value(array, dtype, i, dtype_is_floating(dtype) ? real(random) : static_cast<double>(random() % 20));
  return array;
}

/// What one rank contributes to one layer in one step.
struct Given {
  enum class Kind { absent, dense, factors, rows } kind = Kind::dense;
  Bytes dense;
  std::vector<std::uint32_t> row_indexes;
  Bytes row_values;
  DType factor_dtype = DType::float32;
  std::vector<Bytes> lefts;
  std::vector<Bytes> rights;
  std::vector<std::size_t> counts;

  std::size_t factor_count() const {
    std::size_t total = 0;
    for (const auto count : counts) total += count;
    return total;
  }
  std::vector<FactorRows> segments() const {
    std::vector<FactorRows> rows;
    for (std::size_t i = 0; i < counts.size(); ++i) rows.push_back({lefts[i].data(), rights[i].data(), counts[i]});
    return rows;
  }
};

/// Values in double precision. For each value it has the sum of the absolute values of which the value was made.
struct Exact {
  std::vector<double> values;
  std::vector<double> magnitudes;
};

inline void add_to(Exact& exact, const Given& given, const Layer& layer) {
  if (given.kind == Given::Kind::dense) {
    for (std::size_t i = 0; i < layer.element_count; ++i) {
      const double value = read_value(given.dense, layer.dtype, i);
      exact.values[i] += value;
      exact.magnitudes[i] += std::fabs(value);
    }
  }
  for (std::size_t i = 0; i < given.row_indexes.size() * layer.cols; ++i) {
    const std::size_t at = given.row_indexes[i / layer.cols] * layer.cols + i % layer.cols;
    const double value = read_value(given.row_values, layer.dtype, i);
    exact.values[at] += value;
    exact.magnitudes[at] += std::fabs(value);
  }
  for (std::size_t segment = 0; segment < given.counts.size(); ++segment) {
    for (std::size_t k = 0; k < given.counts[segment]; ++k) {
      for (std::size_t row = 0; row < layer.rows; ++row) {
        const double left = read_value(given.lefts[segment], given.factor_dtype, k * layer.rows + row);
        for (std::size_t col = 0; col < layer.cols; ++col) {
          const double term = left * read_value(given.rights[segment], given.factor_dtype, k * layer.cols + col);
          exact.values[row * layer.cols + col] += term;
          exact.magnitudes[row * layer.cols + col] += std::fabs(term);
        }
      }
    }
  }
}

inline Exact zeros(const Layer& layer) {
  return {std::vector<double>(layer.element_count), std::vector<double>(layer.element_count)};
}

/// Returns the gradient as a worker without factors or rows would have it.
inline Bytes dense_of(const Given& given, const Layer& layer) {
  if (given.kind == Given::Kind::dense) return given.dense;
  Exact exact = zeros(layer);
  add_to(exact, given, layer);
  Bytes array(layer.size_bytes());
  for (std::size_t i = 0; i < layer.element_count; ++i) write_value(array, layer.dtype, i, exact.values[i]);
  return array;
}

inline double epsilon_of(DType dtype) {
  if (dtype == DType::float32) return std::ldexp(1.0, -23);
  if (dtype == DType::float64) return std::ldexp(1.0, -52);
  if (dtype == DType::float16) return std::ldexp(1.0, -10);
  return dtype == DType::bfloat16 ? std::ldexp(1.0, -7) : 0.0;
}

/// The most by which a sum differs if its terms and itself are rounded to the type in which they travel.
inline double rounding_of(DType dtype, const Exact& exact, std::size_t index) {
  const double largest = exact.magnitudes.empty() ? 0.0 : *std::ranges::max_element(exact.magnitudes);
  if (dtype == DType::int8_blocks) return 4 * largest / 127;
  // Below their least normal value the 16-bit types have absolute errors.
  const double relative = dtype == DType::bfloat16 || dtype == DType::float16 ? epsilon_of(dtype) : 0.0;
  return relative * (4 * exact.magnitudes[index] + 1e-3);
}

/// A whole random job. Every method returns the same result on every rank.
struct RandomJob {
  explicit RandomJob(std::uint64_t of) : seed(of) {
    Random random(seed);
    world_size = 1 + static_cast<int>(random() % 8);
    step_count = 2 + random() % 4;
    server_count = random() % 4 == 0 ? 1 + static_cast<int>(random() % 3) : 0;
    shared.chunk_bytes = pick<std::size_t>(random, {64, 192, 4096, 2u << 20});
    shared.small_bytes = pick<std::size_t>(random, {0, 64, 1024, 32u << 10});
    shared.group_bytes = pick<std::size_t>(random, {0, 256, 4096, 256u << 10});
    shared.partition = random() % 4 == 0 ? Partition::coarse : Partition::balanced;
    const std::size_t layer_count = 1 + random() % 10;
    for (std::size_t i = 0; i < layer_count; ++i) layers.push_back(random_layer("layer " + std::to_string(i), random));
    split = random() % 3 == 0 ? random() % (layer_count + 1) : layer_count;
    transient = random() % 4 == 0;
    choose_modes();
  }

  /// Chooses how the servers work and how workers reach them.
  void choose_modes() {
    Random random(seed + 77'000);
    shared.server_cores = static_cast<int>(random() % 4);
    shared.flows = 1 + static_cast<int>(random() % 3);
    shared.transport = pick<Medium>(random, {Medium::tcp, Medium::automatic, Medium::shm});
    if (server_count > 0 && shared.transport == Medium::shm) shared.transport = Medium::tcp;
    shared.aggregation = pick<Aggregation>(
        random, {Aggregation::streaming, Aggregation::streaming, Aggregation::at_once, Aggregation::wide});
    shared.reduce_order = pick<ReduceOrder>(random, {ReduceOrder::rank, ReduceOrder::arrival});
    shared.assignment = pick<Assignment>(random, {Assignment::chunk, Assignment::chunk, Assignment::worker});
    if (random() % 4 == 0) shared.interfaces = {"127.0.0.1", "127.0.0.2"};
    shared.priority_classes = 1 + static_cast<int>(random() % 3);
    shared.dscp = shared.priority_classes == 3 ? std::vector{46, 34, 0} : std::vector{46, 0};
    equal_priorities = random() % 2 == 0;
    using enum WireFormat;
    for (Layer& layer : layers) {
      if (layer.dtype == DType::float32 && layer.scheme != Scheme::project_adam && !is_lossy(layer.scheme))
        layer.wire = pick<WireFormat>(random, {fp32, fp32, bf16, fp16, int8});
      layer.compression.error_feedback = random() % 4 == 0;
    }
    Random core_random(seed + 79'000);
    shared.worker_cores = static_cast<int>(core_random() % 3);
    Random factor_random(seed + 78'000);
    for (Layer& layer : layers)
      if (layer.dtype == DType::float32 && layer.scheme != Scheme::project_adam && factor_random() % 3 == 0)
        layer.compression.factor_wire = pick<WireFormat>(factor_random, {fp32, bf16, fp16});
  }

  /// The coarsest type in which the layer's numbers may travel.
  DType wire_dtype(const Layer& layer) const {
    const DType dense = poseidon::wire_dtype(layer.wire, layer.dtype);
    const DType factors = factor_dtype_of(layer);
    if (dense == DType::int8_blocks) return dense;
    return epsilon_of(dense) > epsilon_of(factors) ? dense : factors;
  }

  /// Which machine a rank counts as part of. In half of the jobs all are on one, which is no different from none.
  std::string host_of(int rank) const {
    Random random(seed + 80'000);
    const auto host_count = pick<std::uint64_t>(random, {1, 1, 2, 3});
    const bool in_turn = random() % 2 == 0;
    const auto place = in_turn ? static_cast<std::uint64_t>(rank) : static_cast<std::uint64_t>(rank) / 2;
    return shared.transport == Medium::shm ? "" : std::to_string(place % host_count);
  }

  /// Which rack the rank's machine is in. In half of the jobs there are none.
  std::string rack_of(int rank) const {
    const std::string machine = host_of(rank);
    if (machine.empty() || Random(seed + 81'000)() % 2 == 0) return "";
    return machine == "0" ? "first" : "second";
  }

  /// The machines, and the racks, whose workers add up among themselves. Empty: none.
  HostNumbers hosts() const {
    if (!shared.reduce_by_host || shared.aggregation == Aggregation::wide ||
        shared.reduce_order == ReduceOrder::arrival || shared.assignment == Assignment::worker)
      return {};
    std::vector<std::string> machines;
    std::vector<std::string> racks;
    for (int rank = 0; rank < world_size; ++rank) {
      machines.push_back(host_of(rank));
      racks.push_back(rack_of(rank));
    }
    return number_hosts(machines, racks);
  }

  /// Returns the options with which one rank connects. `own` has its rank, port and timeout.
  Options options_of(const Options& own) const {
    Options options = with_place_of(own, shared);
    options.compute_threads = 1 + (own.rank + static_cast<int>(seed)) % 3;
    options.machine = host_of(own.rank);
    options.rack = rack_of(own.rank);
    return options;
  }

  template <typename T>
  static T pick(Random& random, std::vector<T> values) {
    return values[random() % values.size()];
  }

  static Layer random_layer(const std::string& name, Random& random) {
    const auto dtype = static_cast<DType>(1 + random() % 7);
    if (random() % 2 == 0) return vector_layer(name, pick<std::size_t>(random, {0, 1, 3, 100, 3000}), dtype);
    if (random() % 4 == 0) return lossy_layer(name, random);
    if (random() % 4 == 0) return row_layer(name, dtype_is_floating(dtype) ? dtype : DType::float32, random);
    const auto scheme = pick<Scheme>(random, {Scheme::automatic, Scheme::automatic, Scheme::ps, Scheme::sfb,
                                              Scheme::sharded_factors, Scheme::project_adam});
    const auto floating = dtype_is_floating(dtype) ? dtype : DType::float32;
    return matrix_layer(name, 1 + random() % 80, 1 + random() % 60, scheme, floating);
  }

  static bool is_lossy(Scheme scheme) { return scheme != Scheme::automatic && traits_of(scheme).lossy; }

  /// Returns a layer of a lossy scheme, or one whose scheme is open and may become one.
  static Layer lossy_layer(const std::string& name, Random& random) {
    std::vector<Scheme> lossy;
    for (const Scheme scheme : all_schemes())
      if (is_lossy(scheme)) lossy.push_back(scheme);
    const Scheme scheme = pick(random, lossy);
    Layer layer = matrix_layer(name, 1 + random() % 80, 1 + random() % 60, scheme);
    layer.compression.topk_fraction = pick<double>(random, {0.01, 0.1, 1.0});
    layer.compression.rows = layer.rows;
    layer.compression.powersgd_rank = 1 + random() % 3;
    if (random() % 3 == 0) layer.rows = layer.cols = 0;
    if (random() % 3 == 0) {
      layer.compression.allowed = scheme;
      layer.scheme = Scheme::automatic;
    }
    return layer;
  }

  /// Returns an embedding, whose gradient may come as rows.
  static Layer row_layer(const std::string& name, DType dtype, Random& random) {
    const auto scheme = pick<Scheme>(random, {Scheme::automatic, Scheme::automatic, Scheme::rows, Scheme::ps});
    Layer layer = matrix_layer(name, 1 + random() % 80, 1 + random() % 20, scheme, dtype);
    layer.row_gradient = true;
    layer.zeros_are_missing = random() % 2 == 0;
    return layer;
  }

  Random random_of(std::uint64_t step, std::size_t layer, std::uint64_t what) const {
    std::seed_seq sequence{seed, step, static_cast<std::uint64_t>(layer), what};
    return Random(sequence);
  }

  Given given(std::uint64_t step, std::size_t index, std::size_t rank) const {
    const Layer& layer = layers[index];
    Random random = random_of(step, index, rank);
    Given given;
    const auto choice = random() % 8;
    if (choice == 0 || (choice < 4 && random_of(step, index, 100)() % 8 == 0)) given.kind = Given::Kind::absent;
    if (choice > 0 && choice < 7 && layer.factorable()) given.kind = Given::Kind::factors;
    if (choice > 0 && choice < 7 && layer.row_gradient) given.kind = Given::Kind::rows;
    if (given.kind == Given::Kind::dense) given.dense = random_array(layer.dtype, layer.element_count, random);
    if (given.kind == Given::Kind::rows) choose_rows(given, layer, random);
    if (given.kind == Given::Kind::factors) choose_factors(given, layer, random);
    return given;
  }

  static void choose_rows(Given& given, const Layer& layer, Random& random) {
    const std::size_t one_of = 1 + random() % 8;
    for (std::size_t row = 0; row < layer.rows; ++row)
      if (random() % one_of == 0) given.row_indexes.push_back(static_cast<std::uint32_t>(row));
    given.row_values = random_array(layer.dtype, given.row_indexes.size() * layer.cols, random);
  }

  static void choose_factors(Given& given, const Layer& layer, Random& random) {
    given.factor_dtype = layer.dtype;
    const auto narrow = pick<DType>(random, {DType::float16, DType::bfloat16, DType::float32});
    if (layer.scheme != Scheme::project_adam && dtype_bytes(narrow) <= dtype_bytes(layer.dtype))
      given.factor_dtype = narrow;
    const std::size_t segment_count = random() % 4;
    for (std::size_t i = 0; i < segment_count; ++i) {
      given.counts.push_back(random() % 6);
      given.lefts.push_back(random_array(given.factor_dtype, given.counts[i] * layer.rows, random));
      given.rights.push_back(random_array(given.factor_dtype, given.counts[i] * layer.cols, random));
    }
  }

  std::uint32_t divisor(std::uint64_t step, const Layer& layer) const {
    return dtype_is_floating(layer.dtype) ? static_cast<std::uint32_t>(1 + random_of(step, 0, 101)() % 9) : 1;
  }
  /// Returns what destinations hold before a step.
  Bytes before(std::uint64_t step, std::size_t index) const {
    Random random = random_of(step, index, 102);
    return random_array(layers[index].dtype, layers[index].element_count, random);
  }
  /// The priorities of some layers, set before this step. They are the same on every rank, or differ between ranks.
  struct ToldPriorities {
    std::size_t first_layer = 0;
    std::vector<LayerPriority> priorities;
    double threshold = 0;
  };
  ToldPriorities told_priorities(std::uint64_t step, std::size_t rank) const {
    Random random = random_of(step, equal_priorities ? 0 : rank, 106);
    std::uniform_real_distribution<double> share(0, 1);
    ToldPriorities told{random() % layers.size(), {}, share(random)};
    if (random() % 3 == 0) return told;  // no priorities are set
    for (std::size_t i = 0; i < layers.size() - told.first_layer; ++i)
      told.priorities.push_back(
          {share(random), static_cast<int>(random() % (static_cast<std::size_t>(shared.priority_classes) + 1)) - 1});
    return told;
  }
  bool accumulates(std::uint64_t step, std::size_t index) const { return random_of(step, index, 103)() % 3 == 0; }
  bool only_gathers(std::uint64_t step, std::size_t index) const { return random_of(step, index, 104)() % 4 == 0; }
  /// Returns what is chosen for a layer before a step. In most steps nothing is chosen.
  SchemeChoice choice(std::uint64_t step, std::size_t index) const {
    Random random = random_of(step, index, 107);
    if (random() % 3 != 0 || !layers[index].factorable()) return {};
    const std::span<const Scheme> schemes = all_schemes();
    return {schemes[random() % schemes.size()], static_cast<double>(random() % 20)};
  }
  /// Returns the K that set_factor_count sets before the first step, or 0 if it is not called.
  std::uint64_t told_factor_count(std::size_t index) const { return random_of(0, index, 105)() % 30; }

  std::uint64_t seed;
  int world_size = 1;
  int server_count = 0;  // the number of dedicated servers; 0: colocated
  std::uint64_t step_count = 1;
  Options shared;
  std::vector<Layer> layers;
  std::size_t split = 0;  // the layers before it are the first model, the others a second one
  bool transient = false;
  bool equal_priorities = true;
};

}  // namespace poseidon::testing
