// SimulatedStore: a job's rendezvous store. The process in slot 0 serves it, and its content is lost with that process.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/thread.h"
#include "poseidon/store.h"
#include "simulation/faulty_network.h"

namespace poseidon::testing {

/// Thread-safe. It outlives the stores that it has opened.
class SimulatedStore {
 public:
  /// `patience`: how long a set tries to reach the server.
  SimulatedStore(std::shared_ptr<FaultyNetwork> network, std::chrono::milliseconds patience)
      : network_(std::move(network)), patience_(patience) {}

  /// Makes this process serve the store, which is empty then.
  void serve(std::shared_ptr<Node> server) {
    const std::lock_guard lock(mutex_);
    server_ = std::move(server);
    content_.clear();
    changed_.notify_all();
  }

  /// The store as this process reaches it.
  std::shared_ptr<Store> open(std::shared_ptr<Node> node) { return std::make_shared<View>(*this, std::move(node)); }

 private:
  class View final : public Store {
   public:
    View(SimulatedStore& store, std::shared_ptr<Node> node) : store_(store), node_(std::move(node)) {}

    Status set(const std::string& key, const std::string& value) override {
      FaultyNetwork& network = *store_.network_;
      const std::uint64_t draws = mix(network.settings().seed, node_->name + " writes to the store");
      network.strike(node_, network.draw_fault(draws, ++set_count_, {Fault::kill, Fault::replace}),
                     node_->name + " writing " + key);
      std::unique_lock lock(store_.mutex_);
      const auto reached = [this] { return store_.reaches(*node_); };
      if (!wait_until(lock, Clock::now() + store_.patience_, reached)) return unreachable();
      store_.content_[key] = value;
      store_.changed_.notify_all();
      return {};
    }

    Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
      std::unique_lock lock(store_.mutex_);
      const auto is_there = [this, &key] { return store_.reaches(*node_) && store_.content_.contains(key); };
      if (wait_until(lock, Clock::now() + timeout, is_there)) return store_.content_[key];
      if (!store_.reaches(*node_)) return unreachable();
      return Status(ErrorCode::timeout, "the store has no " + key);
    }

   private:
    /// Nobody reports the end of a partition, so it looks again and again.
    template <typename Condition>
    bool wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, const Condition& condition) {
      while (!condition()) {
        const auto now = Clock::now();
        if (node_->dead || now >= deadline) return false;
        store_.changed_.wait_until(lock, std::min(deadline, now + std::chrono::milliseconds(5)));
      }
      return true;
    }

    static Status unreachable() { return {ErrorCode::unreachable, "the store cannot be reached"}; }

    SimulatedStore& store_;
    const std::shared_ptr<Node> node_;
    std::uint64_t set_count_ = 0;
  };

  bool reaches(const Node& node) const {
    return server_ && !server_->dead && !node.dead && !network_->blockade(node, *server_) &&
           !network_->blockade(*server_, node);
  }

  const std::shared_ptr<FaultyNetwork> network_;
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  Condition changed_;
  std::shared_ptr<Node> server_;  // the rest is guarded by mutex_
  std::map<std::string, std::string> content_;
};

}  // namespace poseidon::testing
