#include "base/buffer.h"

#include <new>

namespace poseidon {

namespace {
constexpr std::align_val_t kAlignment{64};
}

Buffer::Buffer(std::size_t size_bytes)
    : data_(static_cast<std::byte*>(::operator new(size_bytes == 0 ? 1 : size_bytes, kAlignment))), size_(size_bytes) {}

void Buffer::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }

}  // namespace poseidon
