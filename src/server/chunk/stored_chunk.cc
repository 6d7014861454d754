#include "server/chunk/stored_chunk.h"

#include <cstring>
#include <string>
#include <utility>

#include "kernel/update.h"

namespace poseidon {

namespace {

constexpr std::size_t kMaxArrays = 3;  // the value and two states: Adam's
static_assert(kGradientArray >= kMaxArrays);

Status refused(const std::string& why) { return {ErrorCode::refused, "the server refuses it: " + why}; }

}  // namespace

Status StoredChunk::assign(std::size_t array, std::span<const std::byte> data, DType dtype,
                           std::uint64_t update_count) {
  if (array >= kMaxArrays) return refused("there is no array " + std::to_string(array));
  if (array > 0 && !has_value()) return refused("a state before the value");
  if (array > 0 && (data.size() != arrays_[0]->size() || dtype != dtype_))
    return refused("a state of " + std::to_string(data.size()) + " bytes for a value of " +
                   std::to_string(arrays_[0]->size()));
  if (array == 0) arrays_.clear();  // what a former value's updates left has no meaning for this one
  if (arrays_.size() <= array) arrays_.resize(array + 1);
  arrays_[array] = pool_->take_shared(data.size());
  if (!data.empty()) std::memcpy(arrays_[array]->data(), data.data(), data.size());
  dtype_ = dtype;
  update_count_ = update_count;
  return {};
}

std::shared_ptr<const Buffer> StoredChunk::array(std::size_t index) {
  if (index == kGradientArray) return gradient_;
  if (!has_value() || index >= kMaxArrays) return nullptr;
  writable(index, true);
  return arrays_[index];
}

std::vector<std::shared_ptr<const Buffer>> StoredChunk::arrays() {
  std::vector<std::shared_ptr<const Buffer>> all;
  for (std::size_t index = 0; has_value() && index < arrays_.size(); ++index) all.push_back(array(index));
  return all;
}

/// The memory of an array, to write to: what is being sent at this moment is left as it is. A new
/// state is zeros.
std::byte* StoredChunk::writable(std::size_t index, bool keep) {
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
  arrays_.resize(1);
  arrays_[0] = pool_->share(std::move(sum));
  dtype_ = dtype;
}

Status StoredChunk::update(const UpdateRule& rule, const Buffer& gradient, DType dtype) {
  gradient_.reset();
  if (!has_value()) return refused("an update before the parameters were assigned");
  if (dtype != dtype_ || gradient.size() != arrays_[0]->size())
    return refused("a gradient of " + std::to_string(gradient.size()) + " bytes for parameters of " +
                   std::to_string(arrays_[0]->size()));
  if (dtype != DType::float32 && dtype != DType::float64)
    return refused("servers update float32 and float64 parameters, not " + std::string(dtype_name(dtype)));
  std::vector<std::byte*> states;
  for (std::size_t state = 1; state <= update_state_count(rule); ++state) states.push_back(writable(state, false));
  ++update_count_;
  if (rule.kind == UpdateKind::lamb) {
    update_lamb(rule, gradient, states);
  } else {
    kernel::update(rule, update_count_, writable(0, false), gradient.data(), states,
                   gradient.size() / dtype_bytes(dtype), dtype);
  }
  return {};
}

void StoredChunk::update_lamb(const UpdateRule& rule, const Buffer& gradient, std::span<std::byte* const> states) {
  const std::size_t element_count = gradient.size() / dtype_bytes(dtype_);
  std::byte* parameters = writable(0, false);
  Buffer direction = pool_->take(gradient.size());
  const auto norms = kernel::lamb_direction(rule, update_count_, parameters, gradient.data(), states, direction.data(),
                                            element_count, dtype_);
  kernel::lamb_apply(rule, norms, parameters, direction.data(), element_count, dtype_);
  pool_->give_back(std::move(direction));
}

}  // namespace poseidon
