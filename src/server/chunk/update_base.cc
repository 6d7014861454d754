#include "server/chunk/update_base.h"

#include <utility>

#include "base/invariant.h"
#include "kernel/lossless.h"
#include "wire/messages/contribution.h"

namespace poseidon {

UpdateBase::UpdateBase(std::shared_ptr<const Buffer> value, Coding coding)
    : value_(std::move(value)), width_(value_bytes(coding)), digest_(wire::base_digest(value_->span())) {
  invariant(coding != Coding::none && value_->size() % width_ == 0, "differences are of values that can be coded");
}

std::shared_ptr<const Buffer> UpdateBase::difference_to(const Buffer& updated, BufferPool& pool) const {
  invariant(value_ != nullptr && updated.size() == value_->size(), "an update keeps the size of its value");
  Buffer difference = pool.try_take(updated.size());
  if (!difference) return nullptr;
  kernel::difference(updated.data(), value_->data(), difference.data(), updated.size() / width_, width_);
  return pool.share(std::move(difference));
}

}  // namespace poseidon
