// Notices: texts that a user should read while the job goes on.
#pragma once

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
  /// All notices so far, in order.
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return notices_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> notices_;
};

}  // namespace poseidon
