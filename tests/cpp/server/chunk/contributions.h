// What workers send to a shard, and a worker that records what comes back, for the server's tests.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/chunk/requester.h"

namespace poseidon::testing {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

template <typename T = float>
std::vector<T> values_of(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline wire::Header header_of(wire::Kind kind, std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Header header;
  header.kind = kind;
  header.rank = rank;
  header.worker_count = worker_count;
  header.step = step;
  return header;
}

inline wire::Header push_of(std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Header header = header_of(wire::Kind::push, rank, worker_count, step);
  header.factor_count = wire::kUnboundedFactors;
  return header;
}

/// A push to a chunk whose value the server keeps.
inline wire::Header stored_push_of(std::uint32_t rank, std::uint32_t worker_count, std::uint64_t step = 1) {
  wire::Header header = push_of(rank, worker_count, step);
  header.flags = wire::kStored;
  return header;
}

inline wire::Header absent_of(wire::Header header) {
  header.flags |= wire::kAbsent;
  header.factor_count = 0;
  return header;
}

/// K rows of lefts and K rows of rights.
inline wire::Header factors_of(wire::Header header, std::uint32_t rows, std::uint32_t cols, std::uint32_t count) {
  header.kind = wire::Kind::factors;
  header.rows = rows;
  header.cols = cols;
  header.factor_count = count;
  header.payload_bytes = std::uint64_t{count} * (rows + cols) * dtype_bytes(header.dtype);
  return header;
}

inline wire::Header with_size(wire::Header header, std::size_t size_bytes) {
  header.payload_bytes = size_bytes;
  return header;
}

/// Remembers what it was sent; payloads are copied, and kept alive where `keep` is set.
class RecordingRequester final : public Requester {
 public:
  struct Sent {
    wire::Header header;
    Bytes payload;
    bool has_payload = false;
    std::shared_ptr<const Buffer> kept;
  };

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    Sent& one = sent.emplace_back();
    one.header = header;
    one.has_payload = payload != nullptr;
    if (payload) one.payload.assign(payload->span().begin(), payload->span().end());
    if (keep) one.kept = std::move(payload);
  }
  void refuse(const wire::Header& about, const Status& status) override {
    refusals.push_back(status);
    refused_headers.push_back(about);
  }

  bool keep = false;
  std::vector<Sent> sent;
  std::vector<Status> refusals;
  std::vector<wire::Header> refused_headers;
};

}  // namespace poseidon::testing
