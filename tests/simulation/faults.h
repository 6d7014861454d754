// Faults: which fault each message gets, drawn from a seed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace poseidon::testing {

enum class Fault : std::uint8_t {
  drop,       // a message vanishes
  delay,      // a message waits, and so do all behind it on its connection
  duplicate,  // a message comes twice
  reorder,    // later messages overtake it
  cut,        // the connection ends at both ends, perhaps in the middle of a payload
  half_cut,   // the connection ends at one end; the other end goes on sending to nobody
  partition,  // between two groups of slots nothing crosses for a while, in one direction or in both
  refusal,    // an attempt to connect is refused
  kill,       // a process vanishes without a goodbye
  replace,    // a process is cut off for a while, and replaced although it lives
};
inline constexpr std::size_t kFaultKinds = 10;
std::string_view fault_name(Fault fault);

/// A count for each fault, by the fault's number.
using FaultCounts = std::array<std::size_t, kFaultKinds>;
std::string describe(const FaultCounts& counts);
std::size_t total(const FaultCounts& counts);

/// The chance of each fault per message. For a refusal it is the chance per attempt to connect.
struct FaultRates {
  std::array<double, kFaultKinds> chances{};
  double& operator[](Fault fault) { return chances[static_cast<std::size_t>(fault)]; }
  double operator[](Fault fault) const { return chances[static_cast<std::size_t>(fault)]; }
};

/// A number that looks random and follows from both values (splitmix64).
std::uint64_t mix(std::uint64_t seed, std::uint64_t value);
std::uint64_t mix(std::uint64_t seed, std::string_view text);

/// The fault of one message, and random bits that choose its details.
struct Draw {
  std::optional<Fault> fault;
  std::uint64_t bits = 0;

  /// A number from 0 to `bound` − 1. Different `salt` values give different details of one draw.
  std::uint64_t below(std::uint64_t bound, std::uint64_t salt) const { return mix(bits, salt) % bound; }
};

/// The same key, number and faults to choose from give the same draw.
Draw draw(const FaultRates& rates, std::uint64_t key, std::uint64_t number, std::initializer_list<Fault> possible);

/// Every fault that was injected. Thread-safe.
class FaultLog {
 public:
  void note(Fault fault, const std::string& where);
  FaultCounts counts() const;
  std::size_t total() const;
  /// The last faults, one a line, with the milliseconds since the log began.
  std::string last() const;

 private:
  mutable std::mutex mutex_;
  const std::int64_t begun_ns_ = now_ns();
  FaultCounts counts_{};
  std::deque<std::string> lines_;
};

}  // namespace poseidon::testing
