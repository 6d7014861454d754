// Steps: a client's layers and units, and which of their exchanges are under way.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/pinned.h"
#include "base/thread.h"
#include "client/callers.h"
#include "client/lateness.h"
#include "client/unit_state.h"
#include "poseidon/client.h"
#include "poseidon/options.h"
#include "transport/loop.h"

namespace poseidon {

/// What the plan of the next layers depends on, besides the layers.
struct PlanBase {
  Cluster cluster;
  std::size_t chunk_bytes = 0;
  std::uint32_t first_unit_id = 0;
  std::uint32_t first_layer = 0;
};

/// API threads start exchanges and wait for them. The loop's thread performs the exchanges and reports their ends. All
/// of them share one mutex, which each start and each end takes once. Any thread may call any method unless its comment
/// names a thread.
class Steps : private Pinned {
 public:
  /// Both run on the loop's thread, without the mutex.
  struct Callbacks {
    std::function<void(UnitState&, Operation&&)> on_start;  // the unit's exchange starts
    std::function<void(UnitState&)> on_done;                // its syncer has ended the exchange; calls complete()
  };
  /// A wait calls it about every 100 ms, without the mutex.
  using Look = std::function<void()>;

  /// `options` has the rank of this generation, and must outlive this object.
  Steps(const Options& options, const Cluster& cluster, Callbacks callbacks, std::shared_ptr<Loop> loop);

  // For API threads.
  /// The base of the next plan, or the failure that has ended the job.
  Result<PlanBase> plan_base() const;
  Cluster cluster() const { return now(plan_base_.cluster); }
  /// Sets the chunk size of layers that are added from here on.
  void set_chunk_bytes(std::size_t chunk_bytes);
  /// Starts an operation on a layer. A group starts with its last member. Errors are those of Client::start.
  Status submit(std::uint32_t layer, Operation operation);
  /// See Client::start_all.
  Status submit_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays, std::uint32_t divisor);
  /// See Client::set_rule.
  Status set_rule(std::uint32_t layer, const UpdateRule& rule, bool compared);
  /// Whether Client::choose may set this scheme now. Errors are those of that method.
  Status check_choice(std::uint32_t layer, Scheme scheme) const;
  /// See Client::record_pushes.
  void record(std::uint64_t first, std::uint32_t count);
  /// These wait until all servers and peers have greeted, until every exchange has completed, or until one layer's
  /// exchange has completed. They return the failure that has ended the job, if there is one.
  Status wait_linked(const Look& look);
  Status wait_all(const Look& look);
  Status wait(std::uint32_t layer, const Look& look);
  /// See Client::newest_operation and Client::wait_operation.
  std::uint64_t newest_operation(std::uint32_t layer) const { return now(layer, &LayerState::newest); }
  Status wait_operation(std::uint32_t layer, std::uint64_t number, const Look& look);
  // Collectives are tasks, which have numbers and no layer.
  /// Notes that a task begins, and runs `start(number)` on the loop. Returns its number, or the failure that has ended
  /// the job.
  Result<std::uint64_t> begin_task(std::function<void(std::uint64_t)> start);
  /// Waits until it has ended, or until the time. Returns the source that it ended with. ErrorCode::timeout: it goes
  /// on.
  Result<std::uint32_t> wait_task(std::uint64_t task, Clock::time_point latest, const Look& look);
  bool task_done(std::uint64_t task) const;
  /// Waits until the contributions that await_contributions() has counted have completed.
  void wait_contributions(const Look& look);
  /// See Client::act_for.
  void act_for(std::uint64_t thread);
  /// See Client::expect_other_threads.
  void expect_other_threads();
  /// Whether each thread that uses the client is inside a wait that has begun before this time, by now_ns(), and that
  /// only an exchange can end.
  bool all_wait_since(std::int64_t time_ns);
  /// What a layer waits for that has been started, while others of its group have not; empty if there is none.
  std::string lacks_of_group() const;
  /// Call it after end(). It waits until every exchange has completed, however long that takes, because a running
  /// exchange uses the callers' memory. Then it waits up to `linger` for the connections to close.
  void wait_closed(std::chrono::nanoseconds linger);

  // The state now. A layer that does not exist is treated like one that has never started.
  bool done(std::uint32_t layer) const;
  bool operation_done(std::uint32_t layer, std::uint64_t number) const;
  LayerStats stats(std::uint32_t layer) const { return now(layer, &LayerState::stats); }
  std::vector<LayerStats> recorded(std::uint32_t layer) const;
  Scheme next_scheme(std::uint32_t layer) const;
  /// The unit of a layer, or null if there is no such layer.
  UnitState* unit_of(std::uint32_t layer) const { return now(layer, &LayerState::unit); }
  /// The steps in which this rank was late, and how many steps it is behind.
  LateRank lateness() const;
  std::uint64_t behind() const;
  bool linked() const { return now(linked_); }
  /// The first failure, or ok.
  Status status() const { return now(status_); }
  /// Whether something other than Client::shutdown has ended the job.
  bool failed() const;

  // Only the loop's thread calls the following.
  /// Adds a plan's layers and units, and returns the units.
  std::vector<UnitState*> add(const std::shared_ptr<const Plan>& plan, bool transient, const Links& links);
  /// Lets API threads see the scheme that the unit's syncer takes next.
  void update_scheme(UnitState& unit);
  /// Notes the outcome of the unit's exchange, which has ended, and releases the unit's layers.
  void complete(UnitState& unit);
  /// Releases the unit's layers, because its exchange has ended or will not start.
  void release(UnitState& unit);
  /// A task has ended. Without a source it has failed.
  void end_task(std::uint64_t task, std::optional<std::uint32_t> source);
  /// Notes how many units have a push under way. No further push may start after this.
  void await_contributions(std::size_t unit_count);
  /// Notes that this rank waits for greetings of servers.
  void set_unlinked();
  /// Notes that all servers and peers have greeted, and the number of cores of each server.
  void set_linked(std::vector<int> core_counts);
  /// After this no exchange can start. The status of the first call stays. Call set_closed() afterwards, which wakes
  /// all waiters.
  void end(const Status& status);
  /// Says whether all connections have closed.
  void set_closed(bool closed);

 private:
  /// What a member has now.
  template <typename Member>
  Member now(const Member& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }
  /// What a member of a layer has now.
  template <typename Member>
  Member now(std::uint32_t layer, Member LayerState::*member) const {
    const std::lock_guard lock(mutex_);
    return layer < layers_.size() ? layers_[layer]->*member : Member();
  }

  Status submit_locked(std::uint32_t layer, Operation operation, std::int64_t time_ns);
  Status check_start_locked(std::uint32_t layer, const Operation& operation) const;
  bool join_group_locked(LayerState& layer, Push& push);
  void release_locked(UnitState& unit);
  bool runs_locked(std::uint32_t layer) const { return layer < layers_.size() && layers_[layer]->running; }
  bool runs_locked(std::uint32_t layer, std::uint64_t number) const {
    return runs_locked(layer) && layers_[layer]->newest == number;
  }
  Status wait_locked(std::unique_lock<std::mutex>& lock, std::uint32_t layer, std::uint64_t number, const Look& look);
  template <typename Done>
  Status wait_until(std::unique_lock<std::mutex>& lock, const Look& look, const Done& done,
                    Clock::time_point latest = Clock::time_point::max());
  template <typename Done>
  Status wait_until(const Look& look, const Done& done);

  const Options& options_;
  const Callbacks callbacks_;
  const std::shared_ptr<Loop> loop_;

  mutable std::mutex mutex_;
  Condition changed_;
  std::deque<UnitState> units_;
  std::vector<std::vector<LayerState>> layer_blocks_;  // one per plan
  std::vector<LayerState*> layers_;
  PlanBase plan_base_;
  Callers callers_;
  std::size_t running_count_ = 0;
  std::size_t single_waiter_count_ = 0;  // threads that wait for one layer
  struct Task {
    bool running = true;
    std::optional<std::uint32_t> source;
  };
  std::map<std::uint64_t, Task> tasks_;  // until a wait for it has returned
  std::uint64_t newest_task_ = 0;
  std::size_t awaited_count_ = 0;  // contributions that are waited for, by wait_contributions()
  bool linked_ = false;
  bool closed_ = false;
  Status status_;                             // the first failure, with which every later call fails
  std::map<const Plan*, Lateness> lateness_;  // by the plan with which the layers were added
  std::uint64_t first_recorded_ = 0;          // of each layer's pushes
  std::uint32_t recorded_count_ = 0;
  std::map<const LayerState*, std::vector<LayerStats>> recorded_;
};

}  // namespace poseidon
