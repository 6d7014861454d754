// What running exchanges read and write.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace poseidon::bindings {

/// Keeps objects for the exchanges that use them, by layer.
///
/// An object stays until a wait is over that began when its exchange had started. The GIL guards it. What is let go of
/// is destroyed when the call is over, because that may run Python code, which may call this again.
class Held {
 public:
  using Object = std::shared_ptr<const void>;

  /// Before the exchange starts. If it does not start, call `drop` with what this returns.
  std::uint64_t add(std::uint32_t layer, Object object) {
    held_.emplace(layer, Entry{next_, std::move(object)});
    return next_++;
  }
  void drop(std::uint32_t layer, std::uint64_t number) {
    erase(held_.equal_range(layer), [number](const Entry& one) { return one.number == number; });
  }

  /// Of what has been added so far. A wait that begins now releases these.
  std::uint64_t last() const { return next_ - 1; }
  void release(std::uint32_t layer, std::uint64_t last) {
    erase(held_.equal_range(layer), [last](const Entry& one) { return one.number <= last; });
  }
  void release_all(std::uint64_t last) {
    erase(std::pair(held_.begin(), held_.end()), [last](const Entry& one) { return one.number <= last; });
  }

 private:
  struct Entry {
    std::uint64_t number;
    Object object;
  };

  template <typename Range, typename Which>
  void erase(const Range& range, const Which& which) {
    std::vector<Object> released;
    for (auto one = range.first; one != range.second;) {
      if (!which(one->second)) {
        ++one;
        continue;
      }
      released.push_back(std::move(one->second.object));
      one = held_.erase(one);
    }
  }

  std::unordered_multimap<std::uint32_t, Entry> held_;
  std::uint64_t next_ = 1;
};

}  // namespace poseidon::bindings
