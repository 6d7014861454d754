#include "plan/hosts.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace poseidon {

namespace {

/// A place for a chunk of dedicated servers. Units get new numbers when layers are renewed, and leaders keep what wire
/// formats have rounded off, so the place depends on the name.
std::size_t place_of(const Unit& unit, const Chunk& chunk) {
  std::size_t place = chunk.index;
  for (const char c : unit.name) place = place * 31 + static_cast<unsigned char>(c);
  return place;
}

template <typename Value>
void append_at(std::vector<std::vector<Value>>& lists, std::size_t index, Value value) {
  lists.resize(std::max(lists.size(), index + 1));
  lists[index].push_back(value);
}

bool all_as_long(const std::vector<std::vector<std::uint32_t>>& lists) {
  return std::ranges::all_of(lists, [&](const auto& list) { return list.size() == lists.front().size(); });
}

std::vector<std::uint32_t> numbers_of(const std::vector<std::string>& names) {
  std::map<std::string_view, std::uint32_t> known;
  std::vector<std::uint32_t> numbers;
  numbers.reserve(names.size());
  for (const std::string& name : names)
    numbers.push_back(known.emplace(name, static_cast<std::uint32_t>(known.size())).first->second);
  return numbers;
}

std::size_t distinct(const std::vector<std::uint32_t>& numbers) {
  return numbers.empty() ? 0 : std::size_t{*std::ranges::max_element(numbers)} + 1;
}

}  // namespace

Hosts::Hosts(const Cluster& cluster) : host_of_(cluster.hosts), colocated_(cluster.placement == Placement::colocated) {
  for (std::uint32_t rank = 0; rank < host_of_.size(); ++rank) {
    const std::uint32_t host = host_of_[rank];
    append_at(ranks_, host, rank);
    places_.push_back(static_cast<std::uint32_t>(ranks_[host].size() - 1));
  }
  for (std::uint32_t host = 0; host < ranks_.size(); ++host) {
    most_ranks_ = std::max(most_ranks_, ranks_[host].size());
    rack_of_.push_back(cluster.racks.empty() ? host : cluster.racks[ranks_[host].front()]);
    append_at(machines_, rack_of_[host], host);
    host_places_.push_back(static_cast<std::uint32_t>(machines_[rack_of_[host]].size() - 1));
  }
  even_ = all_as_long(ranks_) && all_as_long(machines_);
}

std::uint32_t Hosts::leader(std::uint32_t host, const Unit& unit, const Chunk& chunk) const {
  return at(host, colocated_ ? places_[static_cast<std::size_t>(chunk.server)] : place_of(unit, chunk));
}

/// The machine whose leader exchanges the rack's sum. If the chunk's server is a worker of the rack, it is its machine.
std::uint32_t Hosts::leading_host(std::uint32_t rack, const Unit& unit, const Chunk& chunk) const {
  const auto& machines = machines_[rack];
  if (machines.size() == 1) return machines.front();
  // With dedicated servers each worker of a machine leads a chunk before the next machine does.
  const std::size_t place =
      colocated_ ? host_places_[host_of_[static_cast<std::size_t>(chunk.server)]] : place_of(unit, chunk) / most_ranks_;
  return machines[place % machines.size()];
}

std::optional<std::uint32_t> Hosts::next(std::uint32_t rank, const Unit& unit, const Chunk& chunk) const {
  const std::uint32_t of_host = leader(host_of_[rank], unit, chunk);
  if (of_host != rank) return of_host;
  const std::uint32_t host = leading_host(rack_of(rank), unit, chunk);
  return host == host_of_[rank] ? std::nullopt : std::optional(leader(host, unit, chunk));
}

std::size_t Hosts::part_of(std::uint32_t leader, std::uint32_t giver) const {
  return share_host(leader, giver) ? places_[giver] : mates_of(leader).size() + place_in_rack(giver);
}

std::uint32_t Hosts::source_of(std::uint32_t rank, std::uint32_t origin) const {
  if (!together() || share_host(rank, origin)) return origin;
  const std::uint32_t of_host = at(host_of_[rank], places_[origin]);
  if (of_host != rank) return of_host;
  if (share_rack(rank, origin)) return origin;
  const auto& machines = machines_[rack_of(rank)];
  const std::uint32_t of_rack = at(machines[place_in_rack(origin) % machines.size()], places_[origin]);
  return of_rack == rank ? origin : of_rack;
}

std::vector<std::uint32_t> Hosts::rack_mates_of(std::uint32_t rank) const {
  std::vector<std::uint32_t> mates;
  for (const std::uint32_t host : machines_[rack_of(rank)])
    mates.insert(mates.end(), ranks_[host].begin(), ranks_[host].end());
  std::ranges::sort(mates);
  return mates;
}

HostNumbers number_hosts(const std::vector<std::string>& machines, const std::vector<std::string>& racks) {
  HostNumbers numbers{numbers_of(machines), numbers_of(racks)};
  const std::size_t machine_count = distinct(numbers.hosts);
  const std::size_t rack_count = distinct(numbers.racks);
  if (rack_count <= 1 || rack_count == machine_count) numbers.racks.clear();
  if (machine_count <= 1 || (machine_count == machines.size() && numbers.racks.empty())) return {};
  return numbers;
}

}  // namespace poseidon
