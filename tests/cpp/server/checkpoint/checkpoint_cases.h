// Snapshots and their files for the tests of checkpoints.
#pragma once

#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cpp/base/temporary_directory.h"
#include "cpp/server/chunk/contributions.h"
#include "cpp/server/chunk/reference_update.h"
#include "server/checkpoint/checkpoint_directory.h"
#include "server/checkpoint/checkpoint_file.h"

namespace poseidon::testing {

inline std::shared_ptr<const Buffer> shared_buffer(const Bytes& bytes) {
  auto buffer = std::make_shared<Buffer>(bytes.size());
  if (!bytes.empty()) std::memcpy(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

/// Returns `count` bytes that depend on `seed`.
inline Bytes chunk_values(std::size_t count, unsigned seed) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(seed * 31 + i * 7 + i / 251);
  return bytes;
}

inline CheckpointUnit unit_of(const std::string& name, std::uint64_t size_bytes, std::uint64_t chunk_bytes,
                              const UpdateRule& rule = {}) {
  return {{0, DType::float32, size_bytes, chunk_bytes, name}, rule};
}

/// Returns array `array` of the whole unit, of which a chunk has a part.
inline Bytes array_of(const CheckpointUnit& about, std::size_t array, unsigned seed = 0) {
  return chunk_values(about.unit.size_bytes, seed + 100 * static_cast<unsigned>(array) + about.unit.name.front());
}

inline CheckpointSnapshot snapshot_of(std::uint64_t version, std::vector<CheckpointUnit> units, std::uint64_t run = 1) {
  CheckpointSnapshot snapshot;
  snapshot.head.job = "default";
  snapshot.head.version = version;
  snapshot.head.run = run;
  snapshot.head.units = std::move(units);
  return snapshot;
}

/// Adds chunk `chunk` of unit `unit`, with `array_count` arrays.
inline void add_record(CheckpointSnapshot& snapshot, std::uint32_t unit, std::uint32_t chunk,
                       std::uint32_t array_count = 2, unsigned seed = 0) {
  const CheckpointUnit& about = snapshot.head.units[unit];
  snapshot.head.records.push_back({unit, chunk, snapshot.head.version, array_count, 0});
  auto& arrays = snapshot.arrays.emplace_back();
  for (std::uint32_t i = 0; i < array_count; ++i) {
    const Bytes whole = array_of(about, i, seed);
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(about.unit.chunk_offset(chunk));
    arrays.push_back(shared_buffer(Bytes(begin, begin + static_cast<std::ptrdiff_t>(about.unit.chunk_size(chunk)))));
  }
}

inline wire::Header header_of_chunk(std::uint32_t unit, std::uint32_t chunk, std::uint64_t step) {
  wire::Header header;
  header.unit = unit;
  header.chunk = chunk;
  header.step = step;
  return header;
}

inline std::string name_of(const CheckpointSnapshot& snapshot, std::uint64_t writer = 1) {
  return checkpoint_name(snapshot.head.job, snapshot.head.version, snapshot.head.run, writer);
}

inline Bytes bytes_of(const Buffer& buffer) { return {buffer.span().begin(), buffer.span().end()}; }

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace poseidon::testing
