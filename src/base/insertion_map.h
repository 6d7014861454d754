// InsertionMap: a map of pointers that is iterated in the order in which they came.
#pragma once

#include <cstddef>
#include <list>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace poseidon {

/// Whatever is done to all elements is done in an order that does not depend on where memory lies. So a simulation can
/// be repeated. References to elements stay valid until the element is removed.
template <typename Key, typename Value>
class InsertionMap {
  using Entries = std::list<std::pair<Key* const, Value>>;

 public:
  using iterator = typename Entries::iterator;
  using const_iterator = typename Entries::const_iterator;
  /// What extract() has found: an element or none, whose address stays the same.
  class Node {
   public:
    bool empty() const { return entry_.empty(); }
    Value& mapped() { return entry_.front().second; }
    const Value& mapped() const { return entry_.front().second; }

   private:
    friend InsertionMap;
    Entries entry_;
  };

  Value& operator[](Key* key) {
    const auto [found, added] = places_.try_emplace(key);
    if (added)
      found->second =
          entries_.emplace(entries_.end(), std::piecewise_construct, std::forward_as_tuple(key), std::tuple<>());
    return found->second->second;
  }
  iterator find(Key* key) {
    const auto found = places_.find(key);
    return found == places_.end() ? entries_.end() : found->second;
  }
  const_iterator find(Key* key) const {
    const auto found = places_.find(key);
    return found == places_.end() ? entries_.end() : const_iterator(found->second);
  }
  Node extract(Key* key) {
    Node node;
    if (const auto found = places_.extract(key); !found.empty())
      node.entry_.splice(node.entry_.end(), entries_, found.mapped());
    return node;
  }
  void erase(const_iterator entry) {
    places_.erase(entry->first);
    entries_.erase(entry);
  }

  iterator begin() { return entries_.begin(); }
  iterator end() { return entries_.end(); }
  const_iterator begin() const { return entries_.begin(); }
  const_iterator end() const { return entries_.end(); }
  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }

 private:
  Entries entries_;
  std::unordered_map<Key*, iterator> places_;
};

}  // namespace poseidon
