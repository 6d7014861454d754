// BlockMap: tells which blocks of an area are in use. It is the sender's own record and never lies in shared memory.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/one_thread.h"
#include "transport/shm/segment.h"

namespace poseidon::shm {

/// Only one thread uses it.
class BlockMap {
 public:
  /// Returns the first run of `count` (> 0) free blocks. It prefers low blocks, so that few blocks are used again and
  /// again.
  std::optional<std::uint32_t> take(std::uint32_t count);
  /// Frees the run that take() returned at `first`. Returns false if there is no such run.
  bool give_back(std::uint32_t first);
  std::uint32_t used_count() const { return one_thread_.checked(used_count_); }

 private:
  std::uint32_t next(std::uint32_t from, bool used) const;
  void mark(std::uint32_t first, std::uint32_t count, bool used);

  static_assert(kBlockCount % 64 == 0);
  std::array<std::uint64_t, kBlockCount / 64> used_{};
  std::array<std::uint32_t, kBlockCount> run_blocks_{};  // by first block; 0: no run starts here
  std::uint32_t used_count_ = 0;
  [[no_unique_address]] OneThread one_thread_{"BlockMap"};
};

}  // namespace poseidon::shm
