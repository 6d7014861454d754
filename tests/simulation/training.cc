#include "simulation/training.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/crc32c.h"
#include "simulation/faults.h"

namespace poseidon::testing {

namespace {

constexpr int kSlots = 32;
constexpr std::size_t kStepsKept = 500;

enum : std::uint64_t { kInitial = 21, kDense, kLeft, kRight, kAbsence, kForm, kRow };

Layer vector_of(const std::string& name, std::size_t element_count, Scheme scheme) {
  Layer layer;
  layer.name = name;
  layer.element_count = element_count;
  layer.scheme = scheme;
  return layer;
}

Layer matrix_of(const std::string& name, std::size_t rows, std::size_t cols, Scheme scheme) {
  Layer layer = vector_of(name, rows * cols, scheme);
  layer.rows = rows;
  layer.cols = cols;
  return layer;
}

/// A layer whose elements are all sent, so that its sum is exact.
Layer whole_topk(const std::string& name, std::size_t element_count) {
  Layer layer = vector_of(name, element_count, Scheme::topk);
  layer.compression.topk_fraction = 1;
  return layer;
}

Layer embedding(const std::string& name, std::size_t rows, std::size_t cols) {
  Layer layer = matrix_of(name, rows, cols, Scheme::rows);
  layer.row_gradient = true;
  return layer;
}

/// Whole numbers from −magnitude to magnitude.
std::vector<float> whole_numbers(std::uint64_t key, std::size_t count, std::uint64_t magnitude) {
  std::vector<float> numbers(count);
  for (std::size_t i = 0; i < count; ++i)
    numbers[i] = static_cast<float>(mix(key, i) % (2 * magnitude + 1)) - static_cast<float>(magnitude);
  return numbers;
}

/// Clears the rows of `gradient.dense` that this rank does not give, and takes out the others.
void choose_rows(SimulatedGradient& gradient, const Layer& layer, std::uint64_t key) {
  for (std::size_t row = 0; row < layer.rows; ++row) {
    const auto values = std::span(gradient.dense).subspan(row * layer.cols, layer.cols);
    if (mix(key, row) % 4 != 0) {
      std::ranges::fill(values, 0.0F);
      continue;
    }
    gradient.row_indexes.push_back(static_cast<std::uint32_t>(row));
    gradient.row_values.insert(gradient.row_values.end(), values.begin(), values.end());
  }
}

std::vector<float> product(const std::vector<float>& left, const std::vector<float>& right, std::size_t rows,
                           std::size_t cols) {
  std::vector<float> dense(rows * cols, 0.0F);
  for (std::size_t k = 0; k < left.size() / rows; ++k)
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t col = 0; col < cols; ++col)
        dense[row * cols + col] += left[k * rows + row] * right[k * cols + col];
  return dense;
}

/// The members' sum divided by the layer's divisor.
std::vector<float> expected_result(std::uint64_t seed, std::uint32_t members, std::uint64_t step, std::size_t layer) {
  const SimulatedLayer& of = simulated_model()[layer];
  std::vector<float> sum(of.layer.element_count, 0.0F);
  for (int slot = 0; slot < kSlots; ++slot) {
    if ((members >> slot & 1) == 0) continue;
    const SimulatedGradient gradient = gradient_of(seed, slot, step, layer);
    if (gradient.absent) continue;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient.dense[i];
  }
  for (float& value : sum) value /= static_cast<float>(of.divisor);
  return sum;
}

}  // namespace

const std::vector<SimulatedLayer>& simulated_model() {
  static const std::vector<SimulatedLayer> kModel{
      {vector_of("convolution", 1237, Scheme::ps), 1, 0, false},
      {vector_of("bias 1", 7, Scheme::automatic), 1, 0, false},
      {matrix_of("linear", 23, 17, Scheme::sfb), 1, 2, true},
      {vector_of("bias 2", 13, Scheme::automatic), 1, 0, true},
      {matrix_of("changing", 19, 29, Scheme::automatic), 1, 1, false},
      {vector_of("norm", 31, Scheme::automatic), 1, 0, false},
      {vector_of("embedding", 301, Scheme::ps), 2, 0, true},
      {matrix_of("adam's", 11, 21, Scheme::project_adam), 1, 2, false},
      {matrix_of("sharded", 37, 40, Scheme::sharded_factors), 1, 2, true},
      {vector_of("empty", 0, Scheme::ps), 1, 0, false},
      {whole_topk("largest", 433), 1, 0, true},
      {embedding("rows", 53, 5), 2, 0, true},
  };
  return kModel;
}

std::vector<Layer> model_layers() {
  std::vector<Layer> layers;
  for (const SimulatedLayer& simulated : simulated_model()) layers.push_back(simulated.layer);
  return layers;
}

SimulatedGradient gradient_of(std::uint64_t seed, int slot, std::uint64_t step, std::size_t layer) {
  const SimulatedLayer& of = simulated_model()[layer];
  const std::uint64_t key = mix(mix(mix(seed, static_cast<std::uint64_t>(slot)), step), layer);
  SimulatedGradient gradient;
  gradient.absent = of.sometimes_absent && mix(key, kAbsence) % 3 == 0;
  if (of.factor_count == 0) {
    gradient.dense = whole_numbers(mix(key, kDense), of.layer.element_count, 9);
    gradient.as_rows = of.layer.row_gradient && mix(key, kForm) % 4 != 0;
    if (gradient.as_rows) choose_rows(gradient, of.layer, mix(key, kRow));
  } else {
    gradient.left = whole_numbers(mix(key, kLeft), of.factor_count * of.layer.rows, 3);
    gradient.right = whole_numbers(mix(key, kRight), of.factor_count * of.layer.cols, 3);
    gradient.dense = product(gradient.left, gradient.right, of.layer.rows, of.layer.cols);
    gradient.as_factors = of.layer.scheme == Scheme::project_adam || mix(key, kForm) % 4 != 0;
  }
  return gradient;
}

TrainingState initial_state(std::uint64_t seed) {
  TrainingState state;
  for (std::size_t layer = 0; layer < simulated_model().size(); ++layer)
    state.parameters.push_back(
        whole_numbers(mix(mix(seed, kInitial), layer), simulated_model()[layer].layer.element_count, 100));
  return state;
}

void apply(TrainingState& state, const StepResults& results, std::uint32_t members) {
  for (std::size_t layer = 0; layer < results.size(); ++layer)
    for (std::size_t i = 0; i < results[layer].size(); ++i) state.parameters[layer][i] += results[layer][i];
  state.members.push_back(members);
}

std::shared_ptr<const StepResults> ClosedForm::results(std::uint64_t step, std::uint32_t members) {
  const std::lock_guard lock(mutex_);
  auto& known = results_[{step, members}];
  if (known) return known;
  auto results = std::make_shared<StepResults>();
  for (std::size_t layer = 0; layer < simulated_model().size(); ++layer)
    results->push_back(expected_result(seed_, members, step, layer));
  const std::shared_ptr<const StepResults> made = known = std::move(results);
  if (results_.size() > kStepsKept) results_.erase(results_.begin());  // of the oldest step
  return made;
}

TrainingState ClosedForm::state(const std::vector<std::uint32_t>& members) {
  TrainingState state = initial_state(seed_);
  {
    const std::lock_guard lock(mutex_);
    const auto& made = newest_.members;
    if (made.size() <= members.size() && std::equal(made.begin(), made.end(), members.begin())) state = newest_;
  }
  for (std::uint64_t step = state.committed(); step < members.size(); ++step)
    apply(state, *results(step, members[step]), members[step]);
  const std::lock_guard lock(mutex_);
  newest_ = state;
  return state;
}

std::uint32_t digest_of(const TrainingState& state) {
  std::uint32_t digest = crc32c(std::as_bytes(std::span(state.members)));
  for (const auto& parameters : state.parameters) digest = crc32c(std::as_bytes(std::span(parameters)), digest);
  return digest;
}

std::string first_difference(const std::vector<float>& got, const std::vector<float>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (std::memcmp(&got[i], &expected[i], sizeof(float)) != 0)
      return "element " + std::to_string(i) + ": " + std::to_string(got[i]) + " instead of " +
             std::to_string(expected[i]);
  return "";
}

std::string first_difference(const TrainingState& got, const TrainingState& expected) {
  for (std::size_t layer = 0; layer < expected.parameters.size(); ++layer) {
    const std::string difference = first_difference(got.parameters[layer], expected.parameters[layer]);
    if (!difference.empty()) return "layer '" + simulated_model()[layer].layer.name + "', " + difference;
  }
  return "";
}

}  // namespace poseidon::testing
