// What servers have to know of layers whose values they keep, and their return from a checkpoint.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "client/client_impl.h"
#include "wire/messages/units.h"

namespace poseidon {

namespace {

/// A number that grows from run to run of a job.
std::uint64_t run_of(std::chrono::system_clock::time_point began) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(began.time_since_epoch()).count());
}

}  // namespace

/// Rank 0 tells every core of every server, on each connection before anything else about these units: so no step of
/// theirs is complete anywhere before.
void ClientImpl::describe_units(const Plan& plan) {
  const Links& links = connections_.links();
  if (links.rank != 0 || closing_ || !left_.ok()) return;
  wire::StoredUnits units{run_of(began_), restored_version_, {}};
  for (const Unit& unit : plan.units) {
    if (!plan.layers[unit.layers.front()].stored || unit.chunks.empty()) continue;
    std::string name = unit.name.substr(0, wire::kMaxUnitNameBytes / 2);
    // Two models of one job may have layers of the same name; they are told apart by their order.
    if (const std::size_t before = stored_names_[name]++; before > 0) name += " (" + std::to_string(before + 1) + ")";
    units.units.push_back({unit.id, unit.dtype, unit.size_bytes, unit.chunks.front().size_bytes, std::move(name)});
  }
  for (const wire::TextMessage& message : units.make(links.rank))
    for (const auto& lanes : links.servers)
      for (Flow* flow : lanes) flow->send(message.header, {message.payload()}, [text = message.text](const Status&) {});
}

Status ClientImpl::restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit) {
  return submit(layer, Restore{destination, version_limit});
}

}  // namespace poseidon
