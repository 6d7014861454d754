// NamedRegistry: what a process knows by name, and more of which can be registered at run time.
#pragma once

#include <algorithm>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace poseidon {

/// `Named` has a member `name`. Thread-safe. Nothing is ever removed, so pointers stay valid.
template <typename Named>
class NamedRegistry {
 public:
  explicit NamedRegistry(std::list<Named> first) : all_(std::move(first)) {}
  /// Returns null if nothing has this name.
  const Named* find(std::string_view name) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(all_, name, &Named::name);
    return found == all_.end() ? nullptr : &*found;
  }
  /// Returns false if the name is taken.
  bool add(Named one) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(all_, one.name, &Named::name) != all_.end()) return false;
    all_.push_back(std::move(one));
    return true;
  }
  /// Returns the names in the order of registration.
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const Named& one : all_) names.push_back(one.name);
    return names;
  }

 private:
  mutable std::mutex mutex_;
  std::list<Named> all_;
};

/// Whether the text has 1 to `most_bytes` lower-case letters, digits and underscores.
inline bool is_name(std::string_view text, std::size_t most_bytes) {
  const auto is_part = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  return !text.empty() && text.size() <= most_bytes && std::ranges::all_of(text, is_part);
}

/// Returns the names with commas between them, for messages.
inline std::string list_of(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

}  // namespace poseidon
