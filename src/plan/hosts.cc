#include "plan/hosts.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace poseidon {

Hosts::Hosts(const Cluster& cluster)
    : host_of_(cluster.hosts),
      over_network_(cluster.hosts_are_racks),
      colocated_(cluster.placement == Placement::colocated) {
  for (std::uint32_t rank = 0; rank < host_of_.size(); ++rank) {
    ranks_.resize(std::max<std::size_t>(ranks_.size(), host_of_[rank] + std::size_t{1}));
    auto& ranks = ranks_[host_of_[rank]];
    places_.push_back(static_cast<std::uint32_t>(ranks.size()));
    ranks.push_back(rank);
  }
  for (const auto& ranks : ranks_) even_ = even_ && ranks.size() == ranks_.front().size();
}

std::uint32_t Hosts::leader(std::uint32_t host, const Unit& unit, const Chunk& chunk) const {
  if (colocated_) return at(host, places_[static_cast<std::size_t>(chunk.server)]);
  // Units get new numbers when layers are renewed, and leaders keep what wire formats have rounded off.
  std::size_t place = chunk.index;
  for (const char c : unit.name) place = place * 31 + static_cast<unsigned char>(c);
  return at(host, place);
}

std::vector<std::uint32_t> number_hosts(const std::vector<std::string>& names) {
  std::map<std::string_view, std::uint32_t> known;
  std::vector<std::uint32_t> hosts;
  hosts.reserve(names.size());
  for (const std::string& name : names)
    hosts.push_back(known.emplace(name, static_cast<std::uint32_t>(known.size())).first->second);
  if (known.size() <= 1 || known.size() == names.size()) hosts.clear();
  return hosts;
}

}  // namespace poseidon
