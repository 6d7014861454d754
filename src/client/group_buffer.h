// GroupBuffer: where small layers travel together.
//
// Layout (plan.h, Unit): the members one after the other, then one element per member that is 1
// where this worker contributed; summed, it says which members anybody contributed to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "poseidon/plan.h"

namespace poseidon {

class GroupBuffer {
 public:
  explicit GroupBuffer(const Unit& unit);

  /// A group is divided as one: whether a member with this divisor fits those that have come.
  bool takes(std::uint32_t divisor) const { return put_count_ == 0 || divisor == divisor_; }
  /// Copies one member in (`absent`: zeros). True when it was the last one to come.
  bool put(std::size_t member, std::span<const std::byte> data, bool absent, std::uint32_t divisor);
  /// Whether some worker contributed to the member, after the exchange.
  bool present(std::size_t member);
  /// Copies one member's result out.
  void take(std::size_t member, std::span<std::byte> data) const;
  /// Makes it ready for the next step.
  void reset() { put_count_ = 0; }

  std::span<std::byte> span() { return buffer_.span(); }

 private:
  std::span<std::byte> footer(std::size_t member);

  const Unit& unit_;
  Buffer buffer_;
  std::size_t put_count_ = 0;
  std::uint32_t divisor_ = 1;  // of the members that have come
};

}  // namespace poseidon
