#include "server/baselines/worker_assignment.h"

#include <cstdint>
#include <map>
#include <utility>

namespace poseidon {

namespace {

class WorkerAssignment;
using Sides = std::vector<WorkerAssignment*>;  // of all cores, by index

/// A guest. Its results go back through its own core.
class RemoteWorker final : public Requester {
 public:
  RemoteWorker(HandoverCore& home, std::uint64_t connection_id, Loop& here)
      : home_(home), connection_id_(connection_id), here_(here) {}

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    here_.check_thread();
    // The payload's memory belongs to this loop's pool, so its last owner must release it on this loop.
    std::shared_ptr<const Buffer> lent;
    if (payload)
      lent = {payload.get(), [&here = here_, held = payload](const Buffer*) mutable {
                here.post([moved = std::move(held)] {});  // a copy could make this thread the last owner
              }};
    payload.reset();
    home_.loop().post([&home = home_, id = connection_id_, header, lent] {
      if (Requester* connection = home.connection(id)) connection->send(header, lent);
    });
  }
  void refuse(const wire::Envelope& about, const Status& status) override {
    here_.check_thread();
    home_.loop().post([&home = home_, id = connection_id_, about, status] {
      if (Requester* connection = home.connection(id)) connection->refuse(about, status);
    });
  }

 private:
  HandoverCore& home_;
  const std::uint64_t connection_id_;
  Loop& here_;
};

/// Identifies a guest by the core to which it is connected, and by its connection there.
struct GuestId {
  std::size_t core = 0;
  std::uint64_t connection = 0;
  // clang-tidy 14 takes the 0 of a comparison for a pointer.
  auto operator<=>(const GuestId&) const = default;  // NOLINT(modernize-use-nullptr)
};

class WorkerAssignment final : public ChunkHandover {
 public:
  WorkerAssignment(HandoverCore& core, std::size_t index, std::shared_ptr<const Sides> sides)
      : core_(core), index_(index), sides_(std::move(sides)) {}

  bool is_elsewhere(const wire::Envelope& contribution) const override { return &owner_of(contribution) != this; }

  void hand_over(const JobName& job, std::uint64_t connection_id, const wire::Header& contribution,
                 std::span<const std::byte> payload, std::function<void()> release) override {
    core_.loop().check_thread();
    WorkerAssignment& owner = owner_of(contribution);
    owner.core_.loop().post(
        [&owner, job, id = GuestId{index_, connection_id}, contribution, payload, release = std::move(release)] {
          owner.take_over(job, id, contribution, payload, release);
        });
  }

  void joined(const JobName& job, std::uint64_t connection_id, const wire::Hello& hello) override {
    tell_others([home = this, id = GuestId{index_, connection_id}, job, hello](WorkerAssignment& there) {
      if (there.core_.add_guest(job, hello))
        there.guests_[job][id] = std::make_unique<RemoteWorker>(home->core_, id.connection, there.core_.loop());
    });
  }
  void closed(const JobName& job, std::uint64_t connection_id) override {
    tell_others([id = GuestId{index_, connection_id}, job](WorkerAssignment& there) { there.remove(job, id); });
  }

  void refuse_guests(const JobName& job, const wire::Envelope& about, const Status& status) override {
    if (const auto guests = guests_.find(job); guests != guests_.end())
      for (auto& [id, worker] : guests->second) worker->refuse(about, status);
  }
  void drop_guests(const JobName& job, Shard& shard) override {
    const auto guests = guests_.find(job);
    if (guests == guests_.end()) return;
    for (auto& [id, worker] : guests->second) shard.drop(*worker);
    guests_.erase(guests);
  }

 private:
  using Guests = std::map<GuestId, std::unique_ptr<RemoteWorker>>;

  WorkerAssignment& owner_of(const wire::Envelope& contribution) const {
    return *(*sides_)[(std::size_t{contribution.unit} + contribution.chunk) % sides_->size()];
  }
  void tell_others(const std::function<void(WorkerAssignment&)>& what) {
    for (WorkerAssignment* other : *sides_)
      if (other != this) other->core_.loop().post([other, what] { what(*other); });
  }
  /// Returns null if the guest has left meanwhile.
  RemoteWorker* guest(const JobName& job, const GuestId& id) {
    core_.loop().check_thread();
    const auto guests = guests_.find(job);
    if (guests == guests_.end()) return nullptr;
    const auto worker = guests->second.find(id);
    return worker == guests->second.end() ? nullptr : worker->second.get();
  }
  void take_over(const JobName& job, const GuestId& id, const wire::Header& contribution,
                 std::span<const std::byte> payload, std::function<void()> release) {
    RemoteWorker* const from = guest(job, id);
    if (from == nullptr) {
      if (release) release();
      return;
    }
    if (Status status =
            core_.shard_of(job)->add(wire::Contribution::read(contribution), *from, payload, std::move(release));
        !status.ok())
      from->refuse(contribution, status);
  }
  void remove(const JobName& job, const GuestId& id) {
    RemoteWorker* const worker = guest(job, id);
    if (worker == nullptr) return;
    core_.shard_of(job)->drop(*worker);
    Guests& guests = guests_.at(job);
    guests.erase(id);
    if (guests.empty()) guests_.erase(job);
    core_.remove_guest(job);
  }

  HandoverCore& core_;
  const std::size_t index_;
  const std::shared_ptr<const Sides> sides_;
  std::map<JobName, Guests> guests_;
};

}  // namespace

void assign_by_worker(const std::vector<std::unique_ptr<ServerCore>>& cores) {
  if (cores.size() < 2) return;
  const auto sides = std::make_shared<Sides>();
  std::vector<std::unique_ptr<WorkerAssignment>> assignments;
  for (std::size_t i = 0; i < cores.size(); ++i)
    sides->push_back(assignments.emplace_back(std::make_unique<WorkerAssignment>(*cores[i], i, sides)).get());
  for (std::size_t i = 0; i < cores.size(); ++i) cores[i]->set_handover(std::move(assignments[i]));
}

}  // namespace poseidon
