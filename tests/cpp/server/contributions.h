// What workers send to a shard, for its tests.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "server/chunk_state.h"

namespace poseidon::testing {

using Floats = std::vector<float>;

inline wire::Header push_of(std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Header header;
  header.kind = wire::Kind::push;
  header.rank = rank;
  header.worker_count = worker_count;
  header.step = step;
  header.factor_count = wire::kUnboundedFactors;
  return header;
}

/// A contribution that owns its payload; `released` counts the calls of its release.
inline Contribution contribution_of(wire::Header header, const Floats& values, int* released = nullptr) {
  Contribution contribution;
  header.payload_bytes = values.size() * sizeof(float);
  contribution.header = header;
  contribution.buffer = Buffer(header.payload_bytes);
  if (!values.empty()) std::memcpy(contribution.buffer.data(), values.data(), header.payload_bytes);
  contribution.payload = std::as_const(contribution.buffer).span();
  if (released != nullptr) contribution.release = [released] { ++*released; };
  return contribution;
}

inline Contribution absent_of(wire::Header header) {
  header.flags |= wire::kAbsent;
  header.factor_count = 0;
  return contribution_of(header, {});
}

/// K rows of lefts, then K rows of rights.
inline Contribution factors_of(wire::Header header, std::uint32_t rows, std::uint32_t cols, const Floats& values) {
  header.kind = wire::Kind::factors;
  header.rows = rows;
  header.cols = cols;
  header.factor_count = static_cast<std::uint32_t>(values.size()) / (rows + cols);
  return contribution_of(header, values);
}

}  // namespace poseidon::testing
