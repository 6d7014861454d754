// StoredChunk: a chunk whose value the server keeps: parameters with the state of their update rule, or
// the last reduced gradient (Parameter Hub §3.1: push and pull).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "poseidon/dtype.h"
#include "poseidon/status.h"
#include "poseidon/update.h"

namespace poseidon {

/// Loop thread of its shard only. Array 0 is the value, 1… the rule's state arrays; kGradientArray is no part of what
/// is stored, but the last step's gradient.
class StoredChunk {
 public:
  explicit StoredChunk(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}

  bool has_value() const { return !arrays_.empty() && arrays_[0]; }
  DType dtype() const { return dtype_; }
  std::uint64_t update_count() const { return update_count_; }

  /// Sets an array, and how many updates it has seen. Refused: a size or dtype other than the value's,
  /// a state array before the value, more arrays than any rule has.
  Status assign(std::size_t array, std::span<const std::byte> data, DType dtype, std::uint64_t update_count);
  /// The array as it is now; it does not change afterwards. A state that no update has made yet is
  /// zeros. Null where there is no value, no such array, or no gradient.
  std::shared_ptr<const Buffer> array(std::size_t index);
  /// The value and the states that it has by now, as they are; they do not change afterwards. Empty without a value.
  std::vector<std::shared_ptr<const Buffer>> arrays();

  /// The value becomes `sum`.
  void replace(Buffer sum, DType dtype);
  /// One step of the rule, which has a kind, with the mean gradient. Refused: no value yet, another size or dtype, a
  /// dtype that is neither float32 nor float64.
  Status update(const UpdateRule& rule, const Buffer& gradient, DType dtype);
  /// The gradient of the last update, to be there until the next.
  void keep_gradient(Buffer gradient) { gradient_ = pool_->share(std::move(gradient)); }

 private:
  std::byte* writable(std::size_t index, bool keep);
  template <typename T>
  void call(const UpdateRule& rule, const std::function<void(const UpdateCall<T>&)>& update, const Buffer& gradient,
            std::size_t state_count);

  const std::shared_ptr<BufferPool> pool_;
  DType dtype_ = DType::float32;
  std::vector<std::shared_ptr<Buffer>> arrays_;
  std::shared_ptr<Buffer> gradient_;  // null: none is kept
  std::uint64_t update_count_ = 0;
};

}  // namespace poseidon
