#include "server/chunk/stored_chunk.h"

#include <cstring>

#include "base/invariant.h"
#include "kernel/kernel.h"

namespace poseidon {

namespace {

constexpr std::size_t kMaxArrays = 1 + kMaxUpdateStates;  // the value and its rule's states
static_assert(kGradientArray >= kMaxArrays);

template <typename T>
std::span<T> elements(std::byte* array, std::size_t size_bytes) {
  return {reinterpret_cast<T*>(array), size_bytes / sizeof(T)};
}

Status refused(const std::string& why) { return {ErrorCode::refused, "the server refuses it: " + why}; }

}  // namespace

std::string no_array(std::size_t index) {
  return concat("there is no array ", index, "; take 0 for the value, or from 1 on a state of its rule");
}

Status StoredChunk::assign(std::size_t array, std::span<const std::byte> data, DType dtype,
                           std::uint64_t update_count) {
  one_thread_.check();
  if (array >= kMaxArrays) return refused(no_array(array));
  if (array > 0 && !has_value()) return refused("the value must be assigned before its states");
  if (array > 0 && (data.size() != arrays_[0]->size() || dtype != dtype_))
    return refused(concat("a state of ", data.size(), " bytes for a value of ", arrays_[0]->size(),
                          "; give one of its size and dtype"));
  if (array == 0) rounded_.reset();
  if (array == 0) arrays_.clear();  // the states that updates of a former value left do not fit this one
  if (arrays_.size() <= array) arrays_.resize(array + 1);
  arrays_[array] = pool_->take_shared(data.size());
  if (!data.empty()) std::memcpy(arrays_[array]->data(), data.data(), data.size());
  dtype_ = dtype;
  update_count_ = update_count;
  states_of_ = nullptr;
  return {};
}

std::shared_ptr<const Buffer> StoredChunk::array(std::size_t index) {
  one_thread_.check();
  if (index == kGradientArray) return gradient_;
  if (!has_value() || index >= kMaxArrays) return nullptr;
  writable(index, true);
  return arrays_[index];
}

std::shared_ptr<const Buffer> StoredChunk::array_as(std::size_t index, DType dtype) {
  one_thread_.check();
  auto own = array(index);
  if (!own || dtype == dtype_) return own;
  if (dtype_ != DType::float32 || dtype != DType::bfloat16) return nullptr;
  if (index == 0 && rounded_) return rounded_;
  const std::size_t value_count = own->size() / sizeof(float);
  auto rounded = pool_->take_shared(array_bytes(dtype, value_count));
  kernel::encode(dtype, reinterpret_cast<const float*>(own->data()), rounded->data(), value_count);
  if (index == 0) rounded_ = rounded;
  return rounded;
}

std::vector<std::shared_ptr<const Buffer>> StoredChunk::arrays() {
  one_thread_.check();
  std::vector<std::shared_ptr<const Buffer>> all;
  for (std::size_t index = 0; has_value() && index < arrays_.size(); ++index) all.push_back(array(index));
  return all;
}

/// Returns the memory of an array for writing. Memory that is being sent at this moment is left unchanged. A new state
/// is zeros.
std::byte* StoredChunk::writable(std::size_t index, bool keep) {
  invariant(has_value() && index < kMaxArrays, "a value comes before the states of its rule");
  if (arrays_.size() <= index) arrays_.resize(index + 1);
  auto& array = arrays_[index];
  if (!array) {
    array = pool_->take_shared(arrays_[0]->size());
    std::memset(array->data(), 0, array->size());
  } else if (!keep && array.use_count() > 1) {
    auto copy = pool_->take_shared(array->size());
    std::memcpy(copy->data(), array->data(), array->size());
    array = std::move(copy);
  }
  return array->data();
}

void StoredChunk::replace(Buffer sum, DType dtype) {
  one_thread_.check();
  invariant(static_cast<bool>(sum), "a value is not empty");
  rounded_.reset();
  begin_states(nullptr);
  arrays_[0] = pool_->share(std::move(sum));
  dtype_ = dtype;
}

/// Forgets the states and the updates of the rule before. None of them means anything to one of another kind.
void StoredChunk::begin_states(const UpdateKind* kind) {
  arrays_.resize(1);
  update_count_ = 0;
  states_of_ = kind;
}

Status StoredChunk::update(const UpdateRule& rule, const Buffer& gradient, DType dtype) {
  one_thread_.check();
  gradient_.reset();
  rounded_.reset();
  if (!has_value()) return refused("the parameters must be assigned before the first update");
  if (dtype != dtype_ || gradient.size() != arrays_[0]->size())
    return refused(concat("a gradient of ", gradient.size(), " bytes for parameters of ", arrays_[0]->size(),
                          "; build the same model on all ranks"));
  if (dtype != DType::float32 && dtype != DType::float64)
    return refused("a rule needs float32 or float64 parameters, not " + std::string(dtype_name(dtype)));
  const std::size_t state_count = update_state_count(rule);
  if (state_count > kMaxUpdateStates)
    return refused(concat("the update rule ", rule.kind->name, " keeps ", state_count, " arrays, at most ",
                          kMaxUpdateStates, " are allowed"));
  if (states_of_ != nullptr && states_of_ != rule.kind) begin_states(rule.kind);
  states_of_ = rule.kind;
  ++update_count_;
  if (dtype == DType::float32)
    call<float>(rule, rule.kind->update_float32, gradient, state_count);
  else
    call<double>(rule, rule.kind->update_float64, gradient, state_count);
  return {};
}

template <typename T>
void StoredChunk::call(const UpdateRule& rule, const std::function<void(const UpdateCall<T>&)>& update,
                       const Buffer& gradient, std::size_t state_count) {
  const std::size_t size_bytes = gradient.size();
  UpdateCall<T> call;
  for (std::size_t state = 0; state < state_count; ++state)
    call.states[state] = elements<T>(writable(state + 1, false), size_bytes);
  Buffer scratch = rule.kind->needs_scratch ? pool_->take(size_bytes) : Buffer();
  call.scratch = elements<T>(scratch.data(), scratch.size());
  call.parameters = elements<T>(writable(0, false), size_bytes);
  call.gradient = {reinterpret_cast<const T*>(gradient.data()), size_bytes / sizeof(T)};
  call.update_count = update_count_;
  call.values = rule.values;
  invariant(call.parameters.size() == call.gradient.size(), "an update has a gradient for each parameter");
  update(call);
  pool_->give_back(std::move(scratch));
}

}  // namespace poseidon
