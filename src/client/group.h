// Group: small layers that travel together, straight from and to their own memory.
//
// Layout on the wire (plan.h, Unit): the members one after the other, then one element per member that is 1
// where this worker contributed; summed, it says which members anybody contributed to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "poseidon/plan.h"

namespace poseidon {

class Group {
 public:
  explicit Group(const Unit& unit);

  /// A group is divided as one: whether a member with this divisor fits those that have come.
  bool takes(std::uint32_t divisor) const { return put_count_ == 0 || divisor == divisor_; }
  /// One member comes (`absent`: it counts as zeros). Its memory is read until the exchange has completed.
  /// True when it was the last one.
  bool put(std::size_t member, std::span<const std::byte> data, bool absent, std::uint32_t divisor);
  /// What is sent, in the order of the layout; complete when all members have come.
  const std::vector<std::span<const std::byte>>& pieces() const { return pieces_; }
  /// Whether some member came as absent.
  bool any_absent() const { return absent_count_ > 0; }
  bool all_absent() const { return absent_count_ == unit_.layers.size(); }
  /// Makes it ready for the next step.
  void reset() {
    put_count_ = 0;
    absent_count_ = 0;
  }

  /// Whether some worker contributed to the member, as a result (of the unit's size) says.
  bool present(std::span<const std::byte> result, std::size_t member) const;
  /// Copies one member's part of a result out.
  void take(std::span<const std::byte> result, std::size_t member, std::span<std::byte> data) const;

 private:
  std::size_t footer_begin() const { return unit_.size_bytes - footer_.size(); }

  const Unit& unit_;
  Buffer footer_;
  Buffer zeros_;  // what an absent member sends; made when there is one
  std::vector<std::span<const std::byte>> pieces_;
  std::size_t put_count_ = 0;
  std::size_t absent_count_ = 0;
  std::uint32_t divisor_ = 1;  // of the members that have come
};

}  // namespace poseidon
