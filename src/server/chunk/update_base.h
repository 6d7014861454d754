// UpdateBase: the value of a stored chunk before an update, from which the update's results may differ by little.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/buffer_pool.h"
#include "base/coding.h"

namespace poseidon {

/// A worker that says in its push which value it has (wire::Contribution::base) gets the difference from it, if it is
/// this one. So nothing is remembered about workers: whatever one of them has done to its value, or missed, shows in
/// the digest. Used by one thread.
class UpdateBase {
 public:
  /// The value is known to nobody.
  UpdateBase() = default;
  /// `value` does not change any more.
  UpdateBase(std::shared_ptr<const Buffer> value, Coding coding);

  /// Whether `digest` is that of the value. 0 never is.
  bool is(std::uint64_t digest) const { return digest != 0 && digest == digest_; }

  /// Returns how `updated` differs (kernel::difference), in memory of the pool. Null: it has no room.
  std::shared_ptr<const Buffer> difference_to(const Buffer& updated, BufferPool& pool) const;

 private:
  std::shared_ptr<const Buffer> value_;
  std::size_t width_ = 0;
  std::uint64_t digest_ = 0;
};

}  // namespace poseidon
