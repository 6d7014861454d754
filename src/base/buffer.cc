#include "base/buffer.h"

#include <new>

namespace poseidon {

namespace {
constexpr std::align_val_t kAlignment{64};

/// The bytes to allocate: at least one, so that an empty array has an address, too.
std::size_t allocated_bytes(std::size_t size_bytes) { return size_bytes == 0 ? 1 : size_bytes; }
}  // namespace

Buffer::Buffer(std::size_t size_bytes)
    : Buffer(static_cast<std::byte*>(::operator new(allocated_bytes(size_bytes), kAlignment)), size_bytes) {}

Buffer Buffer::try_make(std::size_t size_bytes) {
  return {static_cast<std::byte*>(::operator new(allocated_bytes(size_bytes), kAlignment, std::nothrow)), size_bytes};
}

void Buffer::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }

}  // namespace poseidon
