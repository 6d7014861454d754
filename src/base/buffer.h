// Buffer: 64-byte aligned memory that one owner holds.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/invariant.h"

namespace poseidon {

/// Move-only. 64-byte alignment: a cache line, and what JAX needs to take memory without a copy.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size_bytes);
  /// Returns an empty buffer if the machine has not enough memory.
  static Buffer try_make(std::size_t size_bytes);

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  /// The largest size to which it can be resized.
  std::size_t capacity_bytes() const { return capacity_bytes_; }
  /// Sets the size, up to the capacity. The memory stays where it is.
  void resize(std::size_t size_bytes) {
    invariant(size_bytes <= capacity_bytes_, "a buffer is resized within its capacity");
    size_ = size_bytes;
  }
  std::span<std::byte> span() { return {data_.get(), size_}; }
  std::span<const std::byte> span() const { return {data_.get(), size_}; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  Buffer(std::byte* memory, std::size_t size_bytes)
      : data_(memory), size_(memory == nullptr ? 0 : size_bytes), capacity_bytes_(size_) {}

  std::unique_ptr<std::byte[], Free> data_;
  std::size_t size_ = 0;
  std::size_t capacity_bytes_ = 0;
};

/// What is in several pieces of memory, one after the other.
using Pieces = std::vector<std::span<const std::byte>>;

}  // namespace poseidon
