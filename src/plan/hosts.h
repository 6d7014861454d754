// Hosts: which workers share a machine, and which of them leads a chunk there (Poseidon §5.1, "Multi-GPU Settings").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "poseidon/plan.h"

namespace poseidon {

/// The workers of one machine add up their gradients of a chunk among themselves. One of them, the chunk's leader,
/// exchanges the sum with the chunk's server, and gives the result to the others. What peers send each other crosses
/// the network once for each machine: to the sender's gate there, which passes it on. Racks of machines with one worker
/// each do the same (Parameter Hub §3.4).
///
/// Pure: all ranks come to the same answers.
class Hosts {
 public:
  /// Without machines (Cluster::hosts is empty) each worker is for itself.
  explicit Hosts(const Cluster& cluster = {});

  /// Whether workers of one machine add up their gradients among themselves.
  bool together() const { return !ranks_.empty(); }
  std::uint32_t count() const { return static_cast<std::uint32_t>(ranks_.size()); }
  /// Whether what the workers of a machine send each other crosses a network, because it is a rack of machines.
  bool over_network() const { return over_network_; }
  /// Whether all machines have as many workers.
  bool even() const { return even_; }

  // Only if together():
  std::uint32_t host_of(std::uint32_t rank) const { return host_of_[rank]; }
  /// The ranks of a machine, in ascending order.
  const std::vector<std::uint32_t>& ranks_of(std::uint32_t host) const { return ranks_[host]; }
  /// The rank's place among those of its machine.
  std::uint32_t place_of(std::uint32_t rank) const { return places_[rank]; }
  bool share_host(std::uint32_t one, std::uint32_t other) const { return host_of_[one] == host_of_[other]; }
  /// The leader of the chunk on a machine. If the chunk's server is a worker of that machine, it is that worker.
  std::uint32_t leader(std::uint32_t host, const Unit& unit, const Chunk& chunk) const;
  /// Whether a rank sends to another what it sends to all, without a third. Also if workers are not together.
  bool reaches(std::uint32_t from, std::uint32_t to) const {
    return !together() || share_host(from, to) || gate(host_of(to), from) == to;
  }
  /// Who receives on `host` what `rank`, of another machine, sends to all its workers.
  std::uint32_t gate(std::uint32_t host, std::uint32_t rank) const { return at(host, places_[rank]); }

 private:
  std::uint32_t at(std::uint32_t host, std::size_t place) const { return ranks_[host][place % ranks_[host].size()]; }

  std::vector<std::uint32_t> host_of_;             // by rank
  std::vector<std::uint32_t> places_;              // by rank
  std::vector<std::vector<std::uint32_t>> ranks_;  // by host
  bool over_network_ = false;
  bool even_ = true;
  bool colocated_ = true;
};

/// Numbers the machines of the ranks by their names, in the order in which they come. Empty if no two ranks share a
/// machine, or all do: then there is nothing to add up before the network.
std::vector<std::uint32_t> number_hosts(const std::vector<std::string>& names);

}  // namespace poseidon
