// Hosts: which workers share a machine, which machines share a rack, and who leads a chunk there (Poseidon §5.1,
// "Multi-GPU Settings"; Parameter Hub §3.4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "poseidon/plan.h"

namespace poseidon {

/// The workers of one machine add up their gradients of a chunk among themselves: they give them to one of them, the
/// chunk's leader there. The leaders of a rack's machines give their sums to one of them, who exchanges the rack's sum
/// with the chunk's server. The result goes back the same way. What peers send each other crosses a rack's uplink, and
/// a machine's port, once: it goes to the sender's gate there, which passes it on.
///
/// Without racks each machine is a rack of its own. Pure: all ranks come to the same answers.
class Hosts {
 public:
  /// Without machines (Cluster::hosts is empty) each worker is for itself.
  explicit Hosts(const Cluster& cluster = {});

  /// Whether workers add up their gradients among themselves.
  bool together() const { return !ranks_.empty(); }
  /// Whether all machines have as many workers, and all racks as many machines.
  bool even() const { return even_; }
  /// Whether what one worker sends another one crosses a network.
  bool crosses(std::uint32_t from, std::uint32_t to) const { return !together() || !share_host(from, to); }
  /// From whom `rank` receives what `origin` sends to all.
  std::uint32_t source_of(std::uint32_t rank, std::uint32_t origin) const;

  // Only if together():
  std::uint32_t rack_count() const { return static_cast<std::uint32_t>(machines_.size()); }
  std::uint32_t rack_of(std::uint32_t rank) const { return rack_of_[host_of_[rank]]; }
  bool share_host(std::uint32_t one, std::uint32_t other) const { return host_of_[one] == host_of_[other]; }
  bool share_rack(std::uint32_t one, std::uint32_t other) const { return rack_of(one) == rack_of(other); }
  /// The ranks of the machine of `rank`, in ascending order.
  const std::vector<std::uint32_t>& mates_of(std::uint32_t rank) const { return ranks_[host_of_[rank]]; }
  /// The number of machines in the rack of `rank`.
  std::size_t machine_count(std::uint32_t rank) const { return machines_[rack_of(rank)].size(); }
  /// Whether the rank leads the chunk on its machine. If the chunk's server is a worker of that machine, it leads it.
  bool leads(std::uint32_t rank, const Unit& unit, const Chunk& chunk) const {
    return leader(host_of_[rank], unit, chunk) == rank;
  }
  /// To whom the rank gives what it has of the chunk; nullopt: to the chunk's server.
  std::optional<std::uint32_t> next(std::uint32_t rank, const Unit& unit, const Chunk& chunk) const;

  /// A leader numbers what it adds up: first the parts of its machine's workers by their places, then the sums of its
  /// rack's machines by theirs. Its own part, and its own machine's sum, have numbers too.
  std::size_t part_count(std::uint32_t leader) const { return mates_of(leader).size() + machine_count(leader); }
  std::size_t part_of(std::uint32_t leader, std::uint32_t giver) const;
  /// The place of the machine of `rank` in its rack.
  std::size_t place_in_rack(std::uint32_t rank) const { return host_places_[host_of_[rank]]; }

  /// The ranks of the rack of `rank`, in ascending order.
  std::vector<std::uint32_t> rack_mates_of(std::uint32_t rank) const;

 private:
  std::uint32_t leader(std::uint32_t host, const Unit& unit, const Chunk& chunk) const;
  std::uint32_t leading_host(std::uint32_t rack, const Unit& unit, const Chunk& chunk) const;
  std::uint32_t at(std::uint32_t host, std::size_t place) const { return ranks_[host][place % ranks_[host].size()]; }

  std::vector<std::uint32_t> host_of_;                // by rank
  std::vector<std::uint32_t> places_;                 // by rank: its place on its machine
  std::vector<std::vector<std::uint32_t>> ranks_;     // by host
  std::vector<std::uint32_t> rack_of_;                // by host
  std::vector<std::uint32_t> host_places_;            // by host: its place in its rack
  std::vector<std::vector<std::uint32_t>> machines_;  // by rack: its hosts
  std::size_t most_ranks_ = 0;                        // of a machine
  bool even_ = true;
  bool colocated_ = true;
};

/// The machines and racks of a cluster whose ranks have these names of machines, and these labels of racks or none.
struct HostNumbers {
  std::vector<std::uint32_t> hosts;  // Cluster::hosts
  std::vector<std::uint32_t> racks;  // Cluster::racks
};

/// Numbers machines and racks in the order in which they come. Both are empty if there is nothing to add up before the
/// network: no two ranks share a machine or a rack, or all share a machine.
HostNumbers number_hosts(const std::vector<std::string>& machines, const std::vector<std::string>& racks);

}  // namespace poseidon
