// Roles of all ranks fit each other, and each port carries what it has to.
#include "plan/chunk_roles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace poseidon {
namespace {

constexpr std::size_t kChunkBytes = 64 << 10;

/// Of the ranks whose machines the letters name.
Hosts hosts_of(const std::string& machines) {
  std::vector<std::string> names;
  for (const char machine : machines) names.emplace_back(1, machine);
  Cluster cluster;
  cluster.worker_count = static_cast<int>(machines.size());
  cluster.hosts = number_hosts(names, {}).hosts;
  return Hosts(cluster);
}

CollectiveShape shape_of(CollectiveKind kind, std::size_t bytes, std::uint32_t rank, std::uint32_t size) {
  CollectiveShape shape;
  shape.kind = kind;
  shape.root = size - 1;
  shape.rank = rank;
  shape.size = size;
  shape.chunk_bytes = kChunkBytes;
  const bool root = rank == shape.root;
  const std::vector<std::size_t> each(size, bytes);
  switch (kind) {
    case CollectiveKind::all_reduce:
      shape.input_bytes = shape.output_bytes = {bytes};
      break;
    case CollectiveKind::reduce:
      shape.input_bytes = {bytes};
      if (root) shape.output_bytes = {bytes};
      break;
    case CollectiveKind::reduce_scatter:
      shape.input_bytes = each;
      shape.output_bytes = {bytes};
      break;
    case CollectiveKind::all_gather:
      shape.input_bytes = {bytes};
      shape.output_bytes = each;
      break;
    case CollectiveKind::gather:
      shape.input_bytes = {bytes};
      if (root) shape.output_bytes = each;
      break;
    case CollectiveKind::broadcast:
      (root ? shape.input_bytes : shape.output_bytes) = {bytes};
      break;
    case CollectiveKind::scatter:
      if (root) shape.input_bytes = each;
      shape.output_bytes = {bytes};
      break;
    case CollectiveKind::all_to_all:
      shape.input_bytes = shape.output_bytes = each;
      break;
    case CollectiveKind::barrier:
      break;
  }
  return shape;
}

constexpr CollectiveKind kAll[] = {
    CollectiveKind::all_reduce, CollectiveKind::reduce,     CollectiveKind::reduce_scatter,
    CollectiveKind::all_gather, CollectiveKind::gather,     CollectiveKind::broadcast,
    CollectiveKind::scatter,    CollectiveKind::all_to_all, CollectiveKind::barrier};
const std::string kMachines[] = {"a", "ab", "aab", "abcd", "aabb", "aabbcc", "aaab", "aaaa"};

/// A message: its sender and receiver, the chunk, and whether it is a result.
using Message = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, bool>;

struct Sides {
  std::map<Message, std::size_t> sent, awaited;  // with their bytes
};

Sides sides_of(CollectiveKind kind, std::size_t bytes, const std::string& machines) {
  Sides sides;
  const auto size = static_cast<std::uint32_t>(machines.size());
  for (std::uint32_t rank = 0; rank < size; ++rank) {
    const CollectiveShape shape = shape_of(kind, bytes, rank, size);
    EXPECT_TRUE(check_shape(shape).ok()) << check_shape(shape).message();
    std::set<std::uint32_t> chunks;
    for (const ChunkRole& role : roles_of(shape, hosts_of(machines))) {
      EXPECT_TRUE(chunks.insert(role.chunk).second) << "a rank has one role in a chunk";
      if (role.parent) sides.sent[{rank, *role.parent, role.chunk, false}] = role.size_bytes;
      for (const std::uint32_t to : role.receivers) sides.sent[{rank, to, role.chunk, true}] = role.size_bytes;
      if (role.source) sides.awaited[{*role.source, rank, role.chunk, true}] = role.size_bytes;
      for (const auto& level : role.levels) {
        EXPECT_TRUE(std::ranges::is_sorted(level));
        for (const std::uint32_t from : level) sides.awaited[{from, rank, role.chunk, false}] = role.size_bytes;
      }
    }
  }
  return sides;
}

TEST(ChunkRoles, WhatIsSentIsAwaited) {
  for (const auto& machines : kMachines)
    for (const CollectiveKind kind : kAll)
      for (const std::size_t bytes : {0u, 4u, 4096u, 100'000u, 1'000'000u}) {
        const Sides sides = sides_of(kind, bytes, machines);
        EXPECT_EQ(sides.sent, sides.awaited) << collective_name(kind) << " of " << bytes << " on " << machines;
      }
}

/// Bytes that the ranks of each machine send to other machines.
std::map<char, std::size_t> bytes_out(CollectiveKind kind, std::size_t bytes, const std::string& machines) {
  std::map<char, std::size_t> out;
  for (const auto& [message, size_bytes] : sides_of(kind, bytes, machines).sent) {
    const auto [from, to, chunk, is_result] = message;
    if (machines[from] != machines[to]) out[machines[from]] += size_bytes;
  }
  return out;
}

TEST(ChunkRoles, APortCarriesWhatItHasTo) {
  constexpr std::size_t kBytes = 12 * kChunkBytes;
  for (const auto& [machine, bytes] : bytes_out(CollectiveKind::all_reduce, kBytes, "abcd"))
    EXPECT_EQ(bytes, 2 * kBytes * 3 / 4) << machine;
  for (const auto& [machine, bytes] : bytes_out(CollectiveKind::all_reduce, kBytes, "aaabbb"))
    EXPECT_EQ(bytes, kBytes) << "one machine's sum of a half, and the other half's result, on " << machine;
  for (const auto& [machine, bytes] : bytes_out(CollectiveKind::all_gather, kBytes, "aabb"))
    EXPECT_EQ(bytes, 2 * kBytes) << "each rank's array goes to the other machine once, from " << machine;
  for (const auto& [machine, bytes] : bytes_out(CollectiveKind::reduce_scatter, kBytes, "aabb"))
    EXPECT_EQ(bytes, 2 * kBytes) << machine;
  EXPECT_EQ(bytes_out(CollectiveKind::broadcast, kBytes, "abcd")['d'], kBytes) << "the root sends its data once";
  EXPECT_EQ(bytes_out(CollectiveKind::broadcast, kBytes, "abcd")['a'], kBytes / 3 * 2) << "a share to two others";
}

TEST(ChunkRoles, SmallArraysTakeOneHop) {
  for (const auto& [message, bytes] : sides_of(CollectiveKind::all_reduce, 64, "abcd").sent)
    EXPECT_FALSE(std::get<3>(message)) << "a result comes after a part";
  for (const auto& [message, bytes] : sides_of(CollectiveKind::broadcast, 64, "abcd").sent)
    EXPECT_EQ(std::get<0>(message), 3u) << "all comes from the root";
}

TEST(ChunkRoles, ShapesThatDoNotFitAreRefused) {
  for (const CollectiveKind kind : kAll) {
    CollectiveShape shape = shape_of(kind, 100, 0, 3);
    shape.root = 3;
    EXPECT_FALSE(check_shape(shape).ok()) << "no such root";
    shape = shape_of(kind, 100, 0, 3);
    shape.input_bytes.push_back(100);
    EXPECT_FALSE(check_shape(shape).ok()) << "an input too many";
  }
  CollectiveShape shape = shape_of(CollectiveKind::all_gather, 100, 1, 3);
  shape.output_bytes[0] = 50;
  EXPECT_TRUE(check_shape(shape).ok()) << "another rank's array may have another size";
  shape.output_bytes[1] = 50;
  EXPECT_FALSE(check_shape(shape).ok());
}

}  // namespace
}  // namespace poseidon
