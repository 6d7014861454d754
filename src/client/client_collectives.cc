// The collectives of ClientImpl (collective/collectives.h).
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/memory_guard.h"
#include "client/client_impl.h"
#include "plan/chunk_roles.h"
#include "plan/partition.h"

namespace poseidon {

namespace {

Status invalid_call(std::string why) { return {ErrorCode::invalid_argument, std::move(why)}; }

/// The machines and racks of some ranks of a cluster.
Hosts hosts_of(const Cluster& cluster, const std::vector<std::uint32_t>& ranks) {
  if (cluster.hosts.empty()) return Hosts();
  std::vector<std::string> machines, racks;
  for (const std::uint32_t rank : ranks) {
    machines.push_back(std::to_string(cluster.hosts[rank]));
    if (!cluster.racks.empty()) racks.push_back(std::to_string(cluster.racks[rank]));
  }
  HostNumbers numbers = number_hosts(machines, racks);
  Cluster part;
  part.worker_count = static_cast<int>(ranks.size());
  part.hosts = std::move(numbers.hosts);
  part.racks = std::move(numbers.racks);
  return Hosts(part);
}

Status no_communicator(std::uint32_t id) {
  return invalid_call(concat("there is no communicator ", id, "; take the id of one that was added"));
}

}  // namespace

Status ClientImpl::add_communicator(std::uint32_t id, std::vector<std::uint32_t> ranks) {
  const auto own = std::ranges::find(ranks, static_cast<std::uint32_t>(options_.rank));
  if (own == ranks.end()) return invalid_call("a communicator must have this rank");
  auto sorted = ranks;
  std::ranges::sort(sorted);
  if (std::ranges::adjacent_find(sorted) != sorted.end() ||
      sorted.back() >= static_cast<std::uint32_t>(options_.world_size))
    return invalid_call(concat("a communicator must have different ranks, below ", options_.world_size));
  Communicator communicator;
  communicator.id = id;
  communicator.rank = static_cast<std::uint32_t>(own - ranks.begin());
  {
    const std::lock_guard lock(communicators_mutex_);
    const CommunicatorPlace place{communicator.rank, static_cast<std::uint32_t>(ranks.size())};
    if (!communicators_.emplace(id, place).second)
      return invalid_call(concat("there is a communicator ", id, " already; give another id"));
  }
  communicator.hosts = hosts_of(cluster(), ranks);
  communicator.ranks = std::move(ranks);
  loop_->post([this, added = std::move(communicator)] {
    const Status status = closing_ ? Status() : collectives_.add(added);
    if (!status.ok()) fail(status.with_context(connections_.here()), {});
  });
  return {};
}

ClientImpl::CommunicatorPlace ClientImpl::place_in(std::uint32_t communicator) const {
  const std::lock_guard lock(communicators_mutex_);
  const auto found = communicators_.find(communicator);
  return found == communicators_.end() ? CommunicatorPlace() : found->second;
}

Result<std::uint64_t> ClientImpl::start_collective(std::uint32_t communicator, CollectiveCall call) {
  const CommunicatorPlace place = place_in(communicator);
  if (place.size == 0) return no_communicator(communicator);
  if (Status status = check_shape(shape_of_call(call, place.rank, place.size, kChunkAlignmentBytes)); !status.ok())
    return status;
  if (Status status = check_reduction(call.op, call.element, call.divisor); !status.ok()) return status;
  const auto whole = [size = element_bytes(call.element)](const auto& array) { return array.size() % size == 0; };
  if (!std::ranges::all_of(call.inputs, whole) || !std::ranges::all_of(call.outputs, whole))
    return invalid_call(
        concat("an array has a part of an element of ", element_name(call.element), "; give whole ones"));
  return submit_call([this, communicator, begun = std::move(call)](std::uint64_t task) mutable {
    return collectives_.start(communicator, std::move(begun), task);
  });
}

Result<std::uint64_t> ClientImpl::send(std::uint32_t communicator, std::uint32_t to, MessageKind kind,
                                       std::span<const std::byte> data) {
  const CommunicatorPlace place = place_in(communicator);
  if (place.size == 0) return no_communicator(communicator);
  if (to >= place.size || to == place.rank)
    return invalid_call(
        concat("rank ", place.rank, " of ", place.size, " cannot send to rank ", to, "; give another one"));
  return submit_call([=, this](std::uint64_t task) { return collectives_.send(communicator, to, kind, data, task); });
}

Result<std::uint64_t> ClientImpl::receive(std::uint32_t communicator, std::uint32_t from, MessageKind kind,
                                          std::span<std::byte> memory) {
  const CommunicatorPlace place = place_in(communicator);
  if (place.size == 0) return no_communicator(communicator);
  if (from != kAnySource && (from >= place.size || from == place.rank))
    return invalid_call(
        concat("rank ", place.rank, " of ", place.size, " cannot receive from rank ", from, "; give another one"));
  return submit_call(
      [=, this](std::uint64_t task) { return collectives_.receive(communicator, from, kind, memory, task); });
}

Result<std::uint64_t> ClientImpl::submit_call(BeginCall begin) {
  return steps_.begin_task([this, begun = std::move(begin)](std::uint64_t task) { begin_call(task, begun); });
}

/// On the loop. In large jobs peers are connected when a call first needs them.
void ClientImpl::begin_call(std::uint64_t task, const BeginCall& begin) {
  loop_->check_thread();
  if (closing_ || leaving_) return steps_.end_task(task, std::nullopt);
  if (!connections_.all_peers_greeted()) {
    calls_waiting_for_peers_.emplace_back(task, begin);
    return connections_.connect_all_peers();
  }
  const Status status = guard_memory([&] { return begin(task); }, [] { return std::string("a collective"); });
  if (!status.ok()) {
    const bool ends_with_the_job = collectives_.runs(task);
    fail(status.with_context(connections_.here()), {});
    if (!ends_with_the_job) steps_.end_task(task, std::nullopt);
    return;
  }
  fail_if(departures_.ends_collective());
}

Result<std::uint32_t> ClientImpl::wait_collective(std::uint64_t call, std::chrono::milliseconds limit,
                                                  const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  const auto latest = limit.count() == 0 ? Clock::time_point::max() : Clock::now() + limit;
  return steps_.wait_task(call, latest, [&] { look(wait); });
}

}  // namespace poseidon
