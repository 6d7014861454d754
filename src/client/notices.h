// Notices: texts that a user should read while the job goes on.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace poseidon {

/// Any thread may call any method.
class Notices {
 public:
  void add(std::string notice) {
    const std::lock_guard lock(mutex_);
    notices_.push_back(std::move(notice));
  }
  /// Adds those of another list, which only grows, that it does not have yet.
  void follow(const std::vector<std::string>& others) {
    const std::lock_guard lock(mutex_);
    for (; followed_count_ < others.size(); ++followed_count_) notices_.push_back(others[followed_count_]);
  }
  /// All notices so far, in the order in which they were added.
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return notices_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> notices_;
  std::size_t followed_count_ = 0;
};

}  // namespace poseidon
