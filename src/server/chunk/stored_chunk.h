// StoredChunk: a chunk whose value the server keeps. The value is parameters with the state of their update rule, or
// the last reduced gradient (Parameter Hub §3.1: push and pull).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/one_thread.h"
#include "poseidon/dtype.h"
#include "poseidon/status.h"
#include "poseidon/update.h"

namespace poseidon {

/// Says that a stored chunk has no such array, and which it has.
std::string no_array(std::size_t index);

/// Only the loop thread of its shard uses it. Array 0 is the value, and arrays from 1 on are the rule's state.
/// kGradientArray is the last step's gradient, which is not stored.
class StoredChunk {
 public:
  explicit StoredChunk(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}

  bool has_value() const { return !arrays_.empty() && arrays_[0]; }
  DType dtype() const { return dtype_; }
  std::uint64_t update_count() const { return update_count_; }

  /// Sets an array, and the number of updates that it has seen. ErrorCode::refused: its size or dtype is not the
  /// value's; a state array comes before the value; or there are more arrays than any rule has.
  Status assign(std::size_t array, std::span<const std::byte> data, DType dtype, std::uint64_t update_count);
  /// Returns the array as it is now. It does not change afterwards. A state that no update has created yet is zeros.
  /// Returns null if there is no value, no such array, or no gradient.
  std::shared_ptr<const Buffer> array(std::size_t index);
  /// The same as values of `dtype`, which is the value's own, or bfloat16 for float32. Null, too, for other types. The
  /// value is converted once for all who ask between two changes.
  std::shared_ptr<const Buffer> array_as(std::size_t index, DType dtype);
  /// Returns the value and the states that exist by now. They do not change afterwards. Empty if there is no value.
  std::vector<std::shared_ptr<const Buffer>> arrays();

  /// Makes `sum` the value. It has seen no updates, and has no states.
  void replace(Buffer sum, DType dtype);
  /// Does one step of the rule, which must have a kind, with the mean gradient. States that were assigned are taken as
  /// this kind's. A rule of another kind than the last update's begins with states of zeros and an update count of 0.
  /// ErrorCode::refused: there is no value yet; the size or dtype differs; or the dtype is neither float32 nor float64.
  Status update(const UpdateRule& rule, const Buffer& gradient, DType dtype);
  /// Says of which kind of rule the states that were assigned are. Null: that of the next update.
  void set_states_of(const UpdateKind* kind) { states_of_ = kind; }
  /// Keeps the gradient of the last update until the next update.
  void keep_gradient(Buffer gradient) { one_thread_.checked(gradient_) = pool_->share(std::move(gradient)); }

 private:
  void begin_states(const UpdateKind* kind);
  std::byte* writable(std::size_t index, bool keep);
  template <typename T>
  void call(const UpdateRule& rule, const std::function<void(const UpdateCall<T>&)>& update, const Buffer& gradient,
            std::size_t state_count);

  const std::shared_ptr<BufferPool> pool_;
  DType dtype_ = DType::float32;
  std::vector<std::shared_ptr<Buffer>> arrays_;
  std::shared_ptr<Buffer> gradient_;  // null: no gradient is kept
  std::shared_ptr<Buffer> rounded_;   // the value in bfloat16; null: nobody has asked for it since it changed
  std::uint64_t update_count_ = 0;
  const UpdateKind* states_of_ = nullptr;  // whose rules made the states; null: they were assigned, or there are none
  [[no_unique_address]] OneThread one_thread_{"StoredChunk"};
};

}  // namespace poseidon
