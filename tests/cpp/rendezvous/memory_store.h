// MemoryStore: a job's store in this process. It can lose its contents or be unreachable for a while.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/thread.h"
#include "poseidon/store.h"

namespace poseidon::testing {

class MemoryStore {
 public:
  /// One process's access to the store. After `request_count` requests (-1: never) that process is dead.
  class View final : public Store {
   public:
    View(MemoryStore& store, int request_count) : store_(store), requests_left_(request_count) {}

    Status set(const std::string& key, const std::string& value) override {
      const std::lock_guard lock(store_.mutex_);
      if (is_away()) return away();
      store_.values_[key] = value;
      store_.changed_.notify_all();
      return {};
    }

    Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
      std::unique_lock lock(store_.mutex_);
      if (is_away()) return away();
      const auto there = [&] { return store_.values_.contains(key); };
      if (!store_.changed_.wait_for(lock, timeout, there)) return Status(ErrorCode::timeout, "no key '" + key + "'");
      return store_.values_[key];
    }

    /// Whether the store still receives this process's requests.
    bool alive() const { return requests_left_ != 0; }

   private:
    bool is_away() {
      if (requests_left_ == 0) return true;
      if (requests_left_ > 0) --requests_left_;
      return store_.away_;
    }
    static Status away() { return {ErrorCode::unreachable, "the store is away"}; }

    MemoryStore& store_;
    int requests_left_;  // -1: unlimited
  };

  std::shared_ptr<View> open(int request_count = -1) { return std::make_shared<View>(*this, request_count); }

  /// Simulates that the process that served the store has ended. An empty store serves from now on.
  void lose_content() {
    const std::lock_guard lock(mutex_);
    values_.clear();
  }
  void set_away(bool away) {
    const std::lock_guard lock(mutex_);
    away_ = away;
  }
  bool has(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return values_.contains(key);
  }

 private:
  std::mutex mutex_;
  Condition changed_;
  std::map<std::string, std::string> values_;
  bool away_ = false;
};

}  // namespace poseidon::testing
