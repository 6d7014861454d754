// Group: small layers that are exchanged as one, directly from and to their own memory.
//
// The layout on the wire (plan.h, Unit) is the members one after the other, and then the footer: one element per
// member, which is 1 if this worker contributed to the member. The sum of the footers says to which members anybody
// contributed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "poseidon/plan.h"

namespace poseidon {

class Group {
 public:
  explicit Group(const Unit& unit);

  /// Whether a member with this divisor may join. All members of a group have the same divisor.
  bool takes(std::uint32_t divisor) const { return put_count_ == 0 || divisor == divisor_; }
  /// Adds a member; an absent one counts as zeros. Its memory is read until the exchange has completed. Returns true
  /// for the last member.
  bool put(std::size_t member, std::span<const std::byte> data, bool absent, std::uint32_t divisor);
  /// The pieces to send, in the order of the layout. They are complete when all members have been added.
  const Pieces& pieces() const { return pieces_; }
  /// Whether at least one member is absent.
  bool any_absent() const { return absent_count_ > 0; }
  bool all_absent() const { return absent_count_ == unit_.layers.size(); }
  /// Prepares the group for the next step.
  void reset() {
    put_count_ = 0;
    absent_count_ = 0;
  }

  /// Whether some worker contributed to the member. `result` has the unit's size.
  bool present(std::span<const std::byte> result, std::size_t member) const;
  /// Copies one member's part of a result to `data`.
  void take(std::span<const std::byte> result, std::size_t member, std::span<std::byte> data) const;

 private:
  std::size_t footer_begin() const { return unit_.size_bytes - footer_.size(); }

  const Unit& unit_;
  Buffer footer_;
  Buffer zeros_;  // sent for an absent member; allocated when there is one
  Pieces pieces_;
  std::size_t put_count_ = 0;
  std::size_t absent_count_ = 0;
  std::uint32_t divisor_ = 1;  // of the members that have been added
};

}  // namespace poseidon
